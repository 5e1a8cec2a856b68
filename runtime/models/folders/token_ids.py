"""Check of the numbers in the vocabulary files of a tokenizer.

The tokenizers library keeps a table as long as the largest id, and a lack of memory ends its process. So an id beyond
any vocabulary is rejected before the library reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.models.specs.json_file import JsonFile, shown
from staged_pool.stages.errors import ConfigError, shortened

_FILES: Final = ("tokenizer.json", "vocab.json", "added_tokens.json")

_MOST: Final = 2**24
"""Most ids of a vocabulary: fifty times the largest that is published."""

_LONG: Final = re.compile(rb"[\s:\[,]-?\d{8,}(?:[eE.]\S*)?\s*[,\]}]")
"""A number of eight digits or more, in or out of a text. Few files have one: the others are not decoded for it."""


def check_token_ids(body: Path) -> None:
    """Reject vocabulary files with a number beyond any vocabulary.

    Args:
        body: Folder of the tokenizer.

    Raises:
        ConfigError: Names the file and the field.
    """
    for name in _FILES:
        path = body / name
        if not path.is_file() or not _LONG.search(path.read_bytes()):
            continue
        file = JsonFile.read(path, root=body)
        for field, number in _numbers(file.content if file is not None else None):
            if abs(number) > _MOST:
                raise ConfigError(f"{name}: {field}={shown(number)} must be between {-_MOST} and {_MOST}")


def _numbers(value: Any, field: str = "") -> Iterator[tuple[str, int]]:
    """Yield each whole number inside a value, with the fields that lead to it."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield field, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            if isinstance(inner, dict | list | int):
                yield from _numbers(inner, f"{field}.{shortened(name)}" if field else shortened(name))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            if isinstance(inner, dict | list | int):
                yield from _numbers(inner, f"{field}[{place}]")
