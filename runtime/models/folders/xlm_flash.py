"""XLM-RoBERTa in Jina AI's layout: its published `config.json`, converted for classes of transformers.

jina-reranker-v2-base-multilingual, jina-colbert-v2 and others name Python code
(https://huggingface.co/jinaai/xlm-roberta-flash-implementation). Their layers are those of XLM-RoBERTa under other
names, and queries, keys and values are one layer. With rotary positions, transformers calls the model
jina-embeddings-v3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from staged_pool.runtime.models.folders.jina_tasks import V3
from staged_pool.runtime.models.specs.json_file import MOST_LABELS, JsonFile
from staged_pool.stages.errors import ConfigError

FLASH: Final = "has_flash_names"
"""Field of a converted config whose weights have the names of this layout."""

_CONFIG: Final = "XLMRobertaFlashConfig"
_CLASSES: Final = ("XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification", "HF_ColBERT")
_WITH_ADAPTERS: Final = "XLMRobertaLoRA"
_OWN_FIELDS: Final = ("auto_map", "position_embedding_type", "rotary_emb_base", "num_labels")


def with_flash_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the config of a model in this layout; return any other config unchanged.

    Raises:
        ConfigError: A setting is not supported.
    """
    file = JsonFile("config.json", config)
    own = config.get("auto_map")
    named = own.get("AutoConfig") if isinstance(own, dict) else None
    names = file.get("architectures", list, []) or ["XLMRobertaModel"]
    if not isinstance(named, str) or not named.endswith(f".{_CONFIG}") or names == [_WITH_ADAPTERS]:
        return config
    if len(names) != 1 or names[0] not in _CLASSES:
        raise ConfigError(
            f"config.json: architectures={names!r} is not supported for {_CONFIG}, only {', '.join(_CLASSES)}"
        )
    if config.get("lora_adaptations"):
        raise ConfigError(f"config.json: lora_adaptations is not supported for {names[0]}, only for {_WITH_ADAPTERS}")
    name = "XLMRobertaModel" if names[0] == "XLMRobertaForMaskedLM" else str(names[0])
    labels = {
        "id2label": {str(place): f"LABEL_{place}" for place in range(file.positive("num_labels", MOST_LABELS) or 2)}
    }
    kept = labels | {field: value for field, value in config.items() if field not in _OWN_FIELDS} | {FLASH: True}
    positions = file.get("position_embedding_type", str, "absolute")
    if positions == "absolute":
        return kept | {"model_type": "xlm-roberta", "architectures": [name]}
    if positions != "rotary":
        raise ConfigError(
            f"config.json: position_embedding_type={positions!r} is not supported for {_CONFIG}, only absolute and "
            "rotary"
        )
    theta = file.number("rotary_emb_base", 10_000.0)
    return kept | {
        "model_type": V3,
        "architectures": [name.replace("XLMRoberta", "JinaEmbeddingsV3")],
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }
