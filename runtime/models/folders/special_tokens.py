"""Name the special tokens that have no weight in a sparse vector."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import ModelFolder

_WITHOUT_WEIGHT: Final = {"cls_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
"""Tokens that sparse heads give no weight, and how XLM-RoBERTa spells them."""


def special_tokens(folder: ModelFolder) -> tuple[str, ...]:
    """The tokens without a weight, in the tokenizer's spelling. The first, which is BGE-M3's
    token without a vector, and the second stand around a text."""
    root = folder.path
    return tuple(read_special_token(folder.body, field, root=root) or usual for field, usual in _WITHOUT_WEIGHT.items())


def read_special_token(body: Path, field: str, *, root: Path) -> str | None:
    """A special token by its name, such as `mask_token`, in the tokenizer's own spelling. None: not said."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        value = (JsonFile.read(body / name, root=root) or JsonFile.empty()).content.get(field)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            return value
    return None
