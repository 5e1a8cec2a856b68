"""Settings of real, tiny models, one for each task."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.config import EngineConfig
from tests.models.tiny import build

KINDS: Final[Mapping[str, str]] = {
    "embedder": "bge-m3",
    "ranker": "ce-bert-1label",
    "classifier": "seqcls-multiclass",
    "tagger": "tokcls-ner",
    "prompted": "e5-xlmr",
}
"""By the names under which they are served. The first answers where a request names none and it can do the task."""


@functools.cache
def folder(name: str) -> Path:
    """Return the folder of a model of `KINDS`; built once for the process."""
    root = tempfile.TemporaryDirectory(prefix="staged-pool-")
    _ROOTS.append(root)
    return build(KINDS[name], Path(root.name) / name)


_ROOTS: list[tempfile.TemporaryDirectory[str]] = []


def tiny(folder: Path, **settings: Any) -> EngineConfig:
    """Settings of a tiny model: it needs no more than one core."""
    return EngineConfig(**{"model": str(folder), "dtype": "float32", "torch_threads": 1, **settings})


def tiny_models(*names: str) -> Sequence[EngineConfig]:
    """Settings of the models `names`, or of all."""
    return [tiny(folder(name), served_name=name) for name in names or KINDS]
