"""GTE models: their published `config.json`, converted for transformers' `GteModel`.

Alibaba-NLP publishes these models with `model_type: "new"` and their own Python code
(https://huggingface.co/Alibaba-NLP/new-impl). Others use that code under `model_type: "gte"`. transformers has the same
model as `GteModel` and renames the weights as it loads them, so the folder's code is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from staged_pool.runtime.models.folders.special_tokens import tokens_without_weight
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.layers import Projection
from staged_pool.runtime.models.specs.model import ModelFolder, TokenWeightsSpec
from staged_pool.stages.errors import ConfigError

_FIXED: Final[Mapping[str, object]] = {
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "position_embedding_type": "rope",
}
"""Settings of the published code, each with the only value that transformers' class computes."""

_THETA: Final = {"new": 10_000.0, "gte": 160_000.0}
"""Default base of the rotary positions, by `model_type`."""

_WEIGHT, _BIAS = "classifier.weight", "classifier.bias"

_PUBLISHED_FIELDS: Final = (
    *_FIXED, "auto_map", "pack_qkv", "rope_scaling", "rope_theta", "unpad_inputs", "use_memory_efficient_attention",
)  # fmt: skip


def with_native_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a GTE model's config for transformers' class; return any other config unchanged.

    Raises:
        ConfigError: transformers' class does not support a setting.
    """
    kind = config.get("model_type")
    if not is_gte(config) or "rope_parameters" in config:
        return config
    file = JsonFile("config.json", config)
    for field, only in _FIXED.items():
        if (value := config.get(field, only)) != only:
            raise ConfigError(f"config.json: {field}={value!r} is not supported for model_type={kind!r}, only {only!r}")
    names = file.get("architectures", list, [])
    kept = {field: value for field, value in config.items() if field not in _PUBLISHED_FIELDS}
    return kept | {
        "model_type": "gte",
        "architectures": [f"Gte{str(name).removeprefix('New').removeprefix('Gte')}" for name in names],
        "rope_parameters": _rope(file, str(kind)),
        "type_vocab_size": file.get("type_vocab_size", int, 1),
    }


def is_gte(config: Mapping[str, Any]) -> bool:
    """True for the `config.json` of a GTE model."""
    names = [str(name) for name in config.get("architectures") or []]
    if config.get("model_type") == "new":
        return all(name.startswith("New") for name in names)
    return config.get("model_type") == "gte"


def _rope(file: JsonFile, kind: str) -> Mapping[str, Any]:
    """Convert the settings of rotary positions.

    NTK scaling by a factor f multiplies the base by f and divides each frequency by f ** (2 / head width): equation 6
    of https://kexue.fm/archives/9706, in `NTKScalingRotaryEmbedding` of the published code. transformers calls the
    division of all frequencies "linear".
    """
    theta = file.number("rope_theta", _THETA[kind])
    scaling = JsonFile("config.json: rope_scaling", file.get("rope_scaling", dict, {}))
    if not scaling.content:
        return {"rope_type": "default", "rope_theta": theta}
    name = scaling.content.get("type", scaling.content.get("rope_type"))
    factor = scaling.content.get("factor")
    if name != "ntk" or scaling.content.get("mixed_b") is not None:
        raise ConfigError(f"{scaling.name}={scaling.content!r} is not supported for model_type={kind!r}, only ntk")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor < 1:
        raise ConfigError(f"{scaling.name}: factor={factor!r} must be a number of at least 1")
    head = file.size("hidden_size") // file.size("num_attention_heads")
    return {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / head)}


def gives_token_weights(config: Mapping[str, Any]) -> bool:
    """True if a GTE model has a head for sparse vectors: one weight per token."""
    names = config.get("architectures") or [""]
    return is_gte(config) and names[0] == "GteForTokenClassification" and len(config.get("id2label") or {}) == 1


def with_token_weights(folder: ModelFolder) -> ModelFolder:
    """Add a GTE model's head of token weights; return any other folder unchanged.

    The published `gte_embedding.py` computes sparse vectors as BGE-M3 does (https://arxiv.org/abs/2407.19669,
    section 3.2): relu, the maximum for each token id, no weight for special tokens.
    """
    file = folder.body / "model.safetensors"
    if not gives_token_weights(folder.config) or not file.is_file():
        return folder
    try:
        with safe_open(file, "numpy") as tensors:
            found = {_WEIGHT, _BIAS} <= set(tensors.keys())
    except SafetensorError:
        return folder  # `check_files` reports the damaged file
    if not found:
        return folder
    head = TokenWeightsSpec(
        projection=Projection(files=(file,), weight=_WEIGHT, bias=_BIAS), left_out=tokens_without_weight(folder)
    )
    return replace(folder, heads=(*folder.heads, head))
