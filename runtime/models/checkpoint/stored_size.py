"""Size of a model's weights, by its files: known before they are read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from staged_pool.runtime.models.folders.weight_files import weight_files
from staged_pool.stages import foreign_json
from staged_pool.stages.errors import ConfigError

_MOST_HEADER_BYTES: Final = 100_000_000
"""Limit of safetensors itself for the header of a file."""


def stored_weights(body: Path) -> int:
    """Count the weights in the files of a model folder.

    A pickle does not tell before it is loaded: its weights count as two bytes each, which is never too few.

    Args:
        body: Folder of the weights.

    Raises:
        ConfigError: A file is missing or damaged.
    """
    return sum(_weights_of(body / name) for name in weight_files(body))


def _weights_of(file: Path) -> int:
    if file.suffix != ".safetensors":
        return file.stat().st_size // 2
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = foreign_json.decode(opened.read(min(size, _MOST_HEADER_BYTES)))
        return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"{file}: is no file of safetensors, or is damaged") from None
