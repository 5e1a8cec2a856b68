"""Weights in the layout of Jina AI's XLM-RoBERTa, by the names of transformers' classes.

Queries, keys and values are one layer there, and three in transformers. Adapters of tasks (jina-embeddings-v3) have
torch's parametrized layout: `NAME.parametrizations.weight.original`, and beside it
`NAME.parametrizations.weight.0.lora_A` and `lora_B`, each with one matrix for each task.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from staged_pool.runtime.models.checkpoint.static import stored_tensors
from staged_pool.runtime.models.folders.jina_tasks import STACKED
from staged_pool.runtime.models.folders.xlm_flash import FLASH

_TOGETHER: Final = ".mixer.Wqkv."
_LORA: Final = (".lora_A", ".lora_B")
_COMMON: Final = (
    (r"(^|\.)emb_ln\.", r"\1embeddings.LayerNorm."),
    (r"\.parametrizations\.weight\.original$", ".weight"),
    (r"\.parametrizations\.weight\.0\.(lora_[AB])$", r".\1"),
)
_ROTARY: Final = (
    *_COMMON,
    (r"(^|\.)encoder\.layers\.", r"\1layers."),
    (r"\.mixer\.out_proj\.", ".self_attn.o_proj."),
    (r"\.norm1\.", ".post_attention_layernorm."),
    (r"\.norm2\.", ".post_mlp_layernorm."),
)
"""Parts of the published names, and those in transformers, for rotary positions."""
_ABSOLUTE: Final = (
    *_COMMON,
    (r"(^|\.)encoder\.layers\.", r"\1encoder.layer."),
    (r"\.mixer\.out_proj\.", ".attention.output.dense."),
    (r"\.norm1\.", ".attention.output.LayerNorm."),
    (r"\.norm2\.", ".output.LayerNorm."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)
"""The same for a table of positions."""
_APART: Final[Mapping[bool, Sequence[str]]] = {
    True: (".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj."),
    False: (".attention.self.query.", ".attention.self.key.", ".attention.self.value."),
}
"""Names of queries, keys and values in transformers, with rotary positions and without."""


def has_flash_names(config: Mapping[str, Any]) -> bool:
    """True for the converted config of a model with these names."""
    return config.get(FLASH) is True or has_stacked_adapters(config)


def has_stacked_adapters(config: Mapping[str, Any]) -> bool:
    """True for the converted config of a model whose adapters are among its weights."""
    return config.get(STACKED) is True


def model_tensors(body: Path, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read the weights of the base model, by the names in transformers.

    Raises:
        ConfigError: The weights are damaged.
    """
    return {name: tensor for name, tensor in _tensors(body, config) if not name.endswith(_LORA)}


def task_tensors(body: Path, config: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Read the matrices of the tasks: `lora_A` and `lora_B` of each layer, see `task_changes`.

    Raises:
        ConfigError: The weights are damaged.
    """
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in _tensors(body, config):
        layer, _, part = name.removeprefix("roberta.").rpartition(".")
        if name.endswith(_LORA) and not layer.startswith("pooler."):
            found[layer][part] = tensor
    return found


def lora_factor(config: Mapping[str, Any]) -> float:
    """Factor of B A: alpha / rank."""
    return float(config["lora_alpha"]) / int(config["lora_rank"])


def _tensors(body: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor by its name in transformers."""
    rotary = "rope_parameters" in config
    for published, tensor in stored_tensors(body).items():
        name = published
        for pattern, new in _ROTARY if rotary else _ABSOLUTE:
            name = re.sub(pattern, new, name)
        if _TOGETHER not in name:
            yield name, tensor
            continue
        # A is shared by queries, keys and values; B, weight and bias have rows for each.
        rows = 1 if name.endswith(".lora_B") else 0
        parts = [tensor] * 3 if name.endswith(".lora_A") else tensor.chunk(3, dim=rows)
        for apart, part in zip(_APART[rotary], parts, strict=True):
            yield name.replace(_TOGETHER, apart), part.contiguous()
