"""Find the two heads that a folder of BGE-M3 has beside its pooling: weights of tokens, and a vector for each.

Nothing but the files of their weights tells of them. What they compute is in https://arxiv.org/abs/2402.03216
(section 3.2) and in its reference implementation, FlagEmbedding's `M3Embedder`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from staged_pool.runtime.models.folders.parts import read_special_token
from staged_pool.runtime.models.specs import (
    DenseSpec,
    HeadSpec,
    ModelFolder,
    MultiVectorSpec,
    Projection,
    RoleSettings,
    TokenWeightsSpec,
)
from staged_pool.runtime.models.tokenizing.roles import ROLES

_WITHOUT_WEIGHT: Final = {"cls_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
"""Tokens that the sparse head gives no weight, and how XLM-RoBERTa spells them."""

_NAMES: Final = ("sparse_linear", "colbert_linear")


def has_bge_m3_heads(body: Path) -> bool:
    """Whether a transformer's folder holds the weights of at least one of them."""
    return any(_projection(body, name) is not None for name in _NAMES)


def with_bge_m3_heads(folder: ModelFolder) -> ModelFolder:
    """The folder with the heads whose weights lie in it; as it was where there are none."""
    sparse, colbert = (_projection(folder.body, name) for name in _NAMES)
    if sparse is None and colbert is None:
        return folder
    heads: list[HeadSpec] = list(folder.heads)
    notes = folder.notes
    if not (folder.path / "modules.json").is_file():
        heads = [DenseSpec(pooling=("cls",), modules=(), normalize=True)]
        notes = ("no modules.json: cls pooling with normalisation is assumed, as BGE-M3 has it",)
    if sparse is not None:
        heads.append(TokenWeightsSpec(projection=sparse, left_out=_special_tokens(folder)))
    if colbert is not None:
        heads.append(MultiVectorSpec(modules=(colbert,)))
    first = _special_tokens(folder)[0]
    roles = {role: RoleSettings(skipped_first=first) for role in ROLES} if colbert is not None else {}
    return replace(folder, heads=tuple(heads), roles=roles, notes=notes)


def _projection(folder: Path, name: str) -> Projection | None:
    files = tuple(folder / f"{name}.{suffix}" for suffix in ("safetensors", "pt"))
    return Projection(files=files, weight="weight", bias="bias") if any(file.is_file() for file in files) else None


def _special_tokens(folder: ModelFolder) -> tuple[str, ...]:
    """Those that the sparse head gives no weight; the first one of them is also the one without a vector."""
    root = folder.path
    return tuple(read_special_token(folder.body, field, root=root) or usual for field, usual in _WITHOUT_WEIGHT.items())
