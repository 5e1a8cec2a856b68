"""Weights of jina-embeddings-v3 by the names of transformers' class, and the adapters of its tasks.

The published weights have torch's parametrized layout: `NAME.parametrizations.weight.original`, and beside it
`NAME.parametrizations.weight.0.lora_A` and `lora_B`, each with one matrix for each task. Queries, keys and values are
one layer there, and three in transformers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from staged_pool.runtime.models.checkpoint.static import stored_tensors
from staged_pool.runtime.models.folders.jina_tasks import STACKED, V3

_NAMES: Final = (
    (re.compile(r"^roberta\."), ""),
    (re.compile(r"^emb_ln\."), "embeddings.LayerNorm."),
    (re.compile(r"^encoder\.layers\."), "layers."),
    (re.compile(r"\.mixer\.out_proj\."), ".self_attn.o_proj."),
    (re.compile(r"\.norm1\."), ".post_attention_layernorm."),
    (re.compile(r"\.norm2\."), ".post_mlp_layernorm."),
    (re.compile(r"\.parametrizations\.weight\.original$"), ".weight"),
    (re.compile(r"\.parametrizations\.weight\.0\.(lora_[AB])$"), r".\1"),
)
"""Parts of the published names, and those in transformers."""

_TOGETHER: Final = ".mixer.Wqkv."
_APART: Final = (".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj.")
_LORA: Final = (".lora_A", ".lora_B")


def is_published_v3(config: Mapping[str, Any]) -> bool:
    """True for the converted config of the published model, with adapters among its weights."""
    return config.get("model_type") == V3 and config.get(STACKED) is True


def model_tensors(body: Path) -> dict[str, Tensor]:
    """Read the weights of the base model, by the names in transformers.

    Raises:
        ConfigError: The weights are damaged.
    """
    return {name: tensor for name, tensor in _tensors(body) if not name.endswith(_LORA)}


def task_tensors(body: Path) -> dict[str, dict[str, Tensor]]:
    """Read the matrices of the tasks: `lora_A` and `lora_B` of each layer, see `task_changes`.

    Raises:
        ConfigError: The weights are damaged.
    """
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in _tensors(body):
        layer, _, part = name.rpartition(".")
        if name.endswith(_LORA) and not layer.startswith("pooler."):
            found[layer][part] = tensor
    return found


def lora_factor(config: Mapping[str, Any]) -> float:
    """Factor of B A: alpha / rank."""
    return float(config["lora_alpha"]) / int(config["lora_rank"])


def _tensors(body: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor by its name in transformers."""
    for published, tensor in stored_tensors(body).items():
        name = published
        for pattern, new in _NAMES:
            name = pattern.sub(new, name)
        if _TOGETHER not in name:
            yield name, tensor
            continue
        # A is shared by queries, keys and values; B, weight and bias have rows for each.
        rows = 1 if name.endswith(".lora_B") else 0
        parts = [tensor] * 3 if name.endswith(".lora_A") else tensor.chunk(3, dim=rows)
        for apart, part in zip(_APART, parts, strict=True):
            yield name.replace(_TOGETHER, apart), part.contiguous()
