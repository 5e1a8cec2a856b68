"""NomicBERT folders: their published `config.json`, converted for transformers' class or for the class here.

nomic-ai publishes its models with the field names of GPT-2 (`n_embd`) and Python code
(https://huggingface.co/nomic-ai/nomic-bert-2048). transformers has a class for those with gated units. It knows none of
these names, and would take its defaults. Those with GELU, and with experts in some layers, have a class here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.own_models import NOMIC_MOE
from staged_pool.stages.errors import ConfigError

_FIXED: Final[Mapping[str, tuple[object, ...]]] = {
    "causal": (False, None),
    "moe_normalize_expert_weights": (False, None),
    "expert_choice_router": (False, None),
    "num_shared_experts": (0, None),
    "parallel_block": (False, None),
    "prenorm": (False,),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False, None),
    "rotary_emb_scale_base": (None,),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "scale_attn_weights": (True, None),
    "use_rms_norm": (False, None),
}
"""Settings of the published code, each with the values that are supported. The first one is wanted."""

_NAMES: Final[Mapping[str, str]] = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
"""Name in transformers of each size."""

_CLASSES: Final = ("NomicBertModel", "NomicBertForPreTraining", "NomicBertForSequenceClassification")
_BIASES: Final = ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")
_KEPT: Final = (
    "bos_token_id", "eos_token_id", "id2label", "is_matryoshka", "label2id", "matryoshka_dimensions", "torch_dtype",
    "dtype", "sentence_transformers", "problem_type",
)  # fmt: skip


def with_nomic_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the published config of a NomicBERT; return any other config unchanged.

    Raises:
        ConfigError: A setting is not supported.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else "NomicBertModel"
    if config.get("model_type") != "nomic_bert" or "n_embd" not in config or name not in _CLASSES:
        return config
    file = JsonFile("config.json", config)
    for field, values in _FIXED.items():
        if (value := config.get(field)) not in values:
            raise ConfigError(
                f"config.json: {field}={value!r} is not supported for model_type='nomic_bert', only {values[0]!r}"
            )
    activation = file.get("activation_function", str, "gelu")
    experts = file.get("num_experts", int, 0) if file.get("moe_every_n_layers", int, 0) > 0 else 0
    common = {field: config[field] for field in _KEPT if field in config} | {
        **{ours: file.size(theirs) for theirs, ours in _NAMES.items()},
        "layer_norm_eps": file.get("layer_norm_epsilon", float, 1e-5),
        "pad_token_id": file.get("pad_token_id", int, 0),
        "type_vocab_size": file.get("type_vocab_size", int, 2),
        "vocab_size": _rows(file),
    }
    theta = file.number("rotary_emb_base", 10_000.0)
    biases = {field: file.get(field, bool, True) for field in _BIASES}
    if activation == "swiglu" and not experts and not any(biases.values()):
        architecture = "NomicBertModel" if name == "NomicBertForPreTraining" else name
        return common | {"model_type": "nomic_bert", "architectures": [architecture], **_rope(file, theta)}
    if (factor := config.get("rotary_scaling_factor")) is not None:
        raise ConfigError(
            f"config.json: rotary_scaling_factor={factor!r} is not supported for {activation!r}, only None"
        )
    if activation != "gelu" or name == "NomicBertForSequenceClassification":
        raise ConfigError(
            f"config.json: activation_function={activation!r} is not supported for {name} with "
            f"num_experts={experts} and {'' if any(biases.values()) else 'no '}biases: only 'gelu' of a model without "
            "labels, and 'swiglu' without experts and biases"
        )
    chosen = file.get("moe_top_k", int, 1)
    if experts and not 1 <= chosen <= experts:
        raise ConfigError(f"config.json: moe_top_k={chosen} must be from 1 to num_experts={experts}")
    return (
        common
        | biases
        | {
            "model_type": NOMIC_MOE,
            "architectures": ["NomicMoeModel"],
            "moe_every_n_layers": file.get("moe_every_n_layers", int, 0) if experts else 0,
            "moe_top_k": chosen,
            "num_experts": experts,
            "rope_theta": theta,
        }
    )


def _rope(file: JsonFile, theta: float) -> Mapping[str, Any]:
    """Convert the rotary positions. Scaled ones depend on the length of a text beyond `max_trained_positions`."""
    factor = file.content.get("rotary_scaling_factor")
    if factor is None:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor < 1:
        raise ConfigError(f"config.json: rotary_scaling_factor={factor!r} must be a number of at least 1")
    return {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": theta, "factor": float(factor)},
        "max_position_embeddings": file.positive("max_trained_positions") or 2048,
    }


def _rows(file: JsonFile) -> int:
    """Rows of the token embedding: the published code rounds the vocabulary up."""
    step = file.positive("pad_vocab_size_to_multiple") or 1
    return -(-file.size("vocab_size") // step) * step
