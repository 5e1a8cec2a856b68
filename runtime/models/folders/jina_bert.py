"""JinaBERT folders: their published `config.json`, converted for the class here.

jina-embeddings-v2-… and jina-reranker-v1-…-en say `model_type: "bert"`, and name Python code of Jina AI
(https://huggingface.co/jinaai/jina-bert-implementation). Without that code, transformers would load a plain BERT.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.own_models import JINA_BERT
from staged_pool.stages.errors import ConfigError

_CLASSES: Final[Mapping[str, str]] = {
    "JinaBertModel": "JinaBertModel",
    "JinaBertForMaskedLM": "JinaBertModel",  # its head is that of pretraining
    "JinaBertForSequenceClassification": "JinaBertForSequenceClassification",
}
"""Class that reads the weights, by the published class."""

_FEED_FORWARD: Final = ("geglu", "reglu")
_CODE: Final = "jina-bert-v2-qk-post-norm"
"""Repository of the code of the form with normalised queries and keys."""
_KEY_NORM: Final = "attention.self.layer_norm_k.weight"
_PUBLISHED_FIELDS: Final = ("auto_map", "attn_implementation", "emb_pooler", "position_embedding_type")
_NEEDED: Final = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


def with_jina_config(config: Mapping[str, Any], body: Path) -> Mapping[str, Any]:
    """Convert the config of a JinaBERT; return any other config unchanged.

    Args:
        config: `config.json`.
        body: Its folder, whose weights show which of the two forms the model has.

    Raises:
        ConfigError: A setting is not supported.
    """
    if not _is_jina_bert(config):
        return config
    file = JsonFile("config.json", config)
    name = str(file.get("architectures", list, [])[0])
    if name not in _CLASSES:
        raise ConfigError(
            f"config.json: architectures names {name}, which is not supported, only {', '.join(_CLASSES)}"
        )
    unit = file.get("feed_forward_type", str, "original")
    if unit not in _FEED_FORWARD:
        raise ConfigError(
            f"config.json: feed_forward_type={unit!r} is not supported for {name}, only {' and '.join(_FEED_FORWARD)}"
        )
    sizes = {field: file.size(field) for field in _NEEDED}
    if sizes["hidden_size"] % sizes["num_attention_heads"]:
        raise ConfigError("config.json: hidden_size must be a multiple of num_attention_heads")
    kept = {field: value for field, value in config.items() if field not in _PUBLISHED_FIELDS}
    return kept | {
        "model_type": JINA_BERT,
        "architectures": [_CLASSES[name]],
        "qk_norm": _has_key_norms(config, body),
        "type_vocab_size": file.get("type_vocab_size", int, 2),
        "layer_norm_eps": file.get("layer_norm_eps", float, 1e-12),
        "pad_token_id": file.get("pad_token_id", int, 0),
    }


def _is_jina_bert(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures")
    named = names[0] if isinstance(names, list) and names else None
    alibi = config.get("position_embedding_type") == "alibi"
    return config.get("model_type") == "bert" and alibi and isinstance(named, str) and named.startswith("JinaBert")


def _has_key_norms(config: Mapping[str, Any], body: Path) -> bool:
    """True for the form with normalised queries and keys, by the weights; of pickled ones, by the named code."""
    file = body / "model.safetensors"
    if file.is_file():
        try:
            with safe_open(file, "numpy") as tensors:
                return any(name.endswith(_KEY_NORM) for name in tensors.keys())  # noqa: SIM118
        except SafetensorError:
            return False  # `check_files` reports the damaged file
    return _CODE in str(config.get("auto_map"))
