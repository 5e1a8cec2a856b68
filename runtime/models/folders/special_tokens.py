"""Special tokens of a folder, in its tokenizer's spelling."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import ModelFolder

_WITHOUT_WEIGHT: Final = {"cls_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
"""Tokens that have no weight in a sparse vector, in XLM-RoBERTa's spelling."""


def tokens_without_weight(folder: ModelFolder) -> tuple[str, ...]:
    """Tokens that have no weight in a sparse vector.

    The first two stand before and after a text. The first also has no vector in BGE-M3's multi-vector head.
    """
    root = folder.path
    return tuple(read_special_token(folder.body, field, root=root) or usual for field, usual in _WITHOUT_WEIGHT.items())


def read_special_token(body: Path, field: str, *, root: Path) -> str | None:
    """Text of a special token by its name, such as `mask_token`. None: the folder does not name it."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        value = (JsonFile.read(body / name, root=root) or JsonFile.empty()).content.get(field)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            return value
    return None
