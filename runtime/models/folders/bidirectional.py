"""Decoders with attention in both directions, published with code of their own: configs for transformers' classes.

Such code changes no more than the attention mask, and at most adds a linear layer. transformers leaves the causal mask
out where the config says `is_causal: false`, so the folder's code is not needed.

- NVIDIA's Llama embedding models (https://huggingface.co/nvidia/llama-nemotron-embed-1b-v2): `llama_bidirec`.
- NVIDIA's Llama rerankers (https://huggingface.co/nvidia/llama-nemotron-rerank-1b-v2): a linear layer on the pooled
  vector of one text with both; see `bidirectional_reranker`.
- Voyage's open models (https://huggingface.co/voyageai/voyage-4-nano): Qwen3 with a linear layer on each token vector.
  The layer is linear and has no bias, so it is applied to the mean of the vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.layers import Projection
from staged_pool.runtime.models.specs.model import DenseSpec, ModelFolder, PoolingMode
from staged_pool.stages.errors import ConfigError

LLAMA: Final = "llama_bidirec"
"""`model_type` of NVIDIA's models."""

_POOLINGS: Final[Mapping[str, PoolingMode]] = {"avg": "mean", "cls": "cls", "last": "lasttoken"}
"""NVIDIA's names of poolings."""

_RERANKER: Final = "LlamaBidirectionalForSequenceClassification"
"""Class of NVIDIA's rerankers."""

_VOYAGE: Final = "modeling_qwen3_bidirectional."
"""Beginning of the class of Voyage's models in `auto_map`."""

_OWN_FIELDS: Final = ("auto_map", "pooling", "temperature")


def is_bidirectional(config: Mapping[str, Any]) -> bool:
    """True for the published `config.json` of such a decoder."""
    return config.get("model_type") == LLAMA or _is_voyage(config)


def with_bidirectional_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the config of such a decoder for transformers' class; return any other config unchanged.

    Raises:
        ConfigError: The folder's model is no bidirectional encoder.
    """
    if config.get("model_type") == LLAMA:
        names = config.get("architectures") or ["LlamaBidirectionalModel"]
        if names[0] not in ("LlamaBidirectionalModel", _RERANKER):
            raise ConfigError(
                f"config.json: {names[0]} is not supported for model_type={LLAMA!r}, only LlamaBidirectionalModel and "
                f"{_RERANKER}"
            )
        kept = {field: value for field, value in config.items() if field not in _OWN_FIELDS}
        return kept | {"model_type": "llama", "architectures": ["LlamaModel"], "is_causal": False}
    if _is_voyage(config):
        kept = {field: value for field, value in config.items() if field != "auto_map"}
        return kept | {"architectures": ["Qwen3Model"], "is_causal": False}
    return config


def is_bidirectional_reranker(config: Mapping[str, Any]) -> bool:
    """True for the published `config.json` of one of NVIDIA's rerankers."""
    names = config.get("architectures")
    return config.get("model_type") == LLAMA and isinstance(names, list) and names[:1] == [_RERANKER]


def own_pooling(file: JsonFile) -> PoolingMode | None:
    """Return the pooling of one of NVIDIA's models by its `config.json`; None for another model.

    Raises:
        ConfigError: The pooling is not known.
    """
    if file.content.get("model_type") != LLAMA:
        return None
    name = file.get("pooling", str, "avg")
    if name not in _POOLINGS:
        raise ConfigError(f"{file.name}: pooling={name!r} is not supported, only {', '.join(_POOLINGS)}")
    return _POOLINGS[name]


def with_own_projection(folder: ModelFolder) -> ModelFolder:
    """Add the linear layer of one of Voyage's models; return any other folder unchanged.

    Raises:
        ConfigError: The layer cannot be applied to a pooled vector.
    """
    file = JsonFile.read(folder.body / "config.json", root=folder.path)
    if file is None or not _is_voyage(file.content):
        return folder
    [head] = folder.heads
    assert isinstance(head, DenseSpec)
    if set(head.pooling) - {"mean", "lasttoken", "cls"}:
        raise ConfigError(f"{'+'.join(head.pooling)} pooling is not supported for this Qwen3Model, only the mean")
    files = tuple(folder.body / name for name in ("model.safetensors", "pytorch_model.bin"))
    projection = Projection(files=files, weight="linear.weight", bias=None)
    return replace(folder, heads=(replace(head, modules=(projection, *head.modules)),))


def _is_voyage(config: Mapping[str, Any]) -> bool:
    own = config.get("auto_map")
    named = own.get("AutoModel") if isinstance(own, dict) else None
    return config.get("model_type") == "qwen3" and isinstance(named, str) and named.split("--")[-1].startswith(_VOYAGE)
