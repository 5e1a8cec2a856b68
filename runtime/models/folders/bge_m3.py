"""The two extra heads of BGE-M3: sparse token weights, and one vector per token.

A folder shows them only by the files of their weights. Their formulas are in section 3.2 of
https://arxiv.org/abs/2402.03216 and in the reference implementation, FlagEmbedding's `M3Embedder`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from staged_pool.runtime.models.folders.special_tokens import tokens_without_weight
from staged_pool.runtime.models.specs.layers import Projection
from staged_pool.runtime.models.specs.model import (
    DenseSpec,
    HeadSpec,
    ModelFolder,
    MultiVectorSpec,
    RoleSettings,
    TokenWeightsSpec,
)
from staged_pool.runtime.models.tokenizing.input_roles import ROLES

_NAMES: Final = ("sparse_linear", "colbert_linear")


def has_bge_m3_heads(body: Path) -> bool:
    """True if the transformer's folder holds the weights of at least one of these heads."""
    return any(_projection(body, name) is not None for name in _NAMES)


def with_bge_m3_heads(folder: ModelFolder) -> ModelFolder:
    """Add the heads whose weights the folder holds; without such weights, return the folder unchanged."""
    sparse, colbert = (_projection(folder.body, name) for name in _NAMES)
    if sparse is None and colbert is None:
        return folder
    heads: list[HeadSpec] = list(folder.heads)
    notes = folder.notes
    if not (folder.path / "modules.json").is_file():
        heads = [DenseSpec(pooling=("cls",), modules=(), normalize=True)]
        notes = ("no modules.json: cls pooling with normalisation is assumed, as in BGE-M3",)
    if sparse is not None:
        heads.append(TokenWeightsSpec(projection=sparse, left_out=tokens_without_weight(folder)))
    if colbert is not None:
        heads.append(MultiVectorSpec(modules=(colbert,)))
    first = tokens_without_weight(folder)[0]
    roles = {role: RoleSettings(skipped_first=first) for role in ROLES} if colbert is not None else {}
    return replace(folder, heads=tuple(heads), roles=roles, notes=notes)


def _projection(folder: Path, name: str) -> Projection | None:
    files = tuple(folder / f"{name}.{suffix}" for suffix in ("safetensors", "pt"))
    return Projection(files=files, weight="weight", bias="bias") if any(file.is_file() for file in files) else None
