"""Configs of checkpoints as classes of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from staged_pool.runtime.models.folders.bidirectional import is_bidirectional
from staged_pool.runtime.models.folders.embedding_gemma import TEXT
from staged_pool.runtime.models.folders.engine_retrievers import is_engine_config
from staged_pool.runtime.models.folders.files import FIRST_VERSION
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.runtime.models.specs.own_models import OWN_TYPES
from staged_pool.stages.errors import ConfigError

_CONVERTED: Final = frozenset(
    {"gte", "nomic_bert", "jina_embeddings_v3", "qwen2", "qwen3", "eurobert", "xlm-roberta", TEXT, *OWN_TYPES}
)
"""Each `model_type` to which published configs are converted."""


def read_config(folder: ModelFolder, *, own_code: bool) -> PreTrainedConfig:
    """Read the config into its class of transformers or of the folder's own code."""
    kind = folder.config.get("model_type")
    if kind == "gte" and not hasattr(transformers, "GteConfig"):
        known = f"transformers {transformers.__version__}; {FIRST_VERSION['gte']} and newer know it"
        raise ConfigError(f"config.json: model_type='gte' is not known to {known}")
    # A converted config is not that of the file, which may name the folder's own code.
    converted = kind in _CONVERTED and folder.config != _file(folder)
    if converted or kind == "gte" or is_bidirectional(_file(folder)):
        config: PreTrainedConfig = CONFIG_MAPPING[kind].from_dict(dict(folder.config))
        config._name_or_path = str(folder.body)
        return config
    if folder.architecture == "vision-language model" and folder.config != _file(folder):  # of another class
        described: PreTrainedConfig = CONFIG_MAPPING[folder.config["model_type"]].from_dict(dict(folder.config))
        return described
    found: PreTrainedConfig = AutoConfig.from_pretrained(folder.body, local_files_only=True, trust_remote_code=own_code)
    return found


def is_engine(folder: ModelFolder) -> bool:
    """True for a page retriever in the layout of colpali-engine."""
    return is_engine_config(folder.config, _file(folder))


def _file(folder: ModelFolder) -> Mapping[str, Any]:
    """Content of `config.json`, as it is written."""
    file = JsonFile.read(folder.body / "config.json", root=folder.body) or JsonFile.empty()
    content: Mapping[str, Any] = file.content
    return content
