"""Jina's embedding models with an adapter for each task: their published configs, prompts and adapters.

- jina-embeddings-v3 (https://arxiv.org/abs/2409.10173): XLM-RoBERTa with rotary positions. A task has one prompt. The
  adapters are among its weights; in jina-embeddings-v3-hf they are folders of peft's files, such as `retrieval_query/`.
- jina-embeddings-v5-text (https://arxiv.org/abs/2602.15547): Qwen3, or EuroBERT. The adapters are folders of peft's
  files in `adapters/`, and a task reads queries and documents.

Most name Python code, and a first module `custom_st.Transformer`, which are not run. That of v5 is the only module: it
pools and normalises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.models.folders.adapters import SETTINGS as ADAPTER_SETTINGS
from staged_pool.runtime.models.specs.adapters import AdapterSpec
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import ModelFolder, PoolingMode
from staged_pool.stages.errors import ConfigError

V3: Final = "jina_embeddings_v3"
"""`model_type` of transformers for jina-embeddings-v3."""
STACKED: Final = "has_stacked_adapters"
"""Field of a converted config whose adapters are among the weights."""
CUSTOM: Final = "custom_st.Transformer"
"""First module of both models in `modules.json`."""

_V5: Final = "jina_embeddings_v5"
_V3_CLASS: Final = "XLMRobertaLoRA"
_V3_PROMPTS: Final[Mapping[str, str]] = {
    "retrieval.query": "Represent the query for retrieving evidence documents: ",
    "retrieval.passage": "Represent the document for retrieval: ",
}
"""Prompts of tasks, from `config.json` of jina-embeddings-v3; other tasks have none."""
_V3_TASKS: Final = (*_V3_PROMPTS, "separation", "classification", "text-matching")
_V3_ROLES: Final[Mapping[str, str]] = {"query": "retrieval.query", "document": "retrieval.passage"}
"""Task of each role."""
_V5_PROMPTS: Final[Mapping[str, str]] = {"query": "Query: ", "document": "Document: "}
"""Prompt of each role, from `modeling_jina_embeddings_v5.py`."""
_V5_USUAL: Final = "retrieval"
"""Task of requests that name none."""
_OWN_FIELDS: Final = ("auto_map", "position_embedding_type", "rotary_emb_base")


def with_task_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the config of such a model for transformers' class; return any other config unchanged.

    The names of the tasks stay in it.

    Raises:
        ConfigError: A setting is malformed or not supported.
    """
    file = JsonFile("config.json", config)
    if _is_v3(config):
        tasks = _names(file, "lora_adaptations")
        if (kind := config.get("position_embedding_type")) != "rotary":
            raise ConfigError(
                f"config.json: position_embedding_type={kind!r} is not supported for {_V3_CLASS}, only rotary"
            )
        if file.get("load_trained_adapters", bool, False) is not True:
            raise ConfigError(
                f"config.json: load_trained_adapters must be true for {_V3_CLASS}: the weights have adapters"
            )
        for field in ("lora_alpha", "lora_rank", "rotary_emb_base"):
            if file.number(field, None) is None:
                raise ConfigError(f"config.json: {field} is missing")
        kept = {field: value for field, value in config.items() if field not in _OWN_FIELDS}
        return kept | {
            "model_type": V3,
            "architectures": ["JinaEmbeddingsV3Model"],
            "lora_adaptations": tasks,
            STACKED: True,
            "rope_parameters": {"rope_type": "default", "rope_theta": float(config["rotary_emb_base"])},
        }
    if config.get("model_type") == _V5:
        if (names := file.get("architectures", list, ["JinaEmbeddingsV5Model"])) != ["JinaEmbeddingsV5Model"]:
            raise ConfigError(
                f"config.json: architectures={names!r} is not supported for model_type={_V5!r}, only "
                "JinaEmbeddingsV5Model"
            )
        _names(file, "task_names")
        decoder = file.get("is_decoder", bool, True)
        kept = {field: value for field, value in config.items() if field not in ("auto_map", "is_decoder")}
        kind, name = ("qwen3", "Qwen3Model") if decoder else ("eurobert", "EuroBertModel")
        return kept | {"model_type": kind, "architectures": [name]}
    return config


def has_tasks(folder: Path) -> bool:
    """True if a folder is that of such a model."""
    file = JsonFile.read(folder / "config.json", root=folder)
    if file is None:
        return False
    return _is_v3(file.content) or file.content.get("model_type") == _V5 or bool(_native_v3_tasks(folder, file))


def has_only_own_module(folder: Path, modules: JsonFile) -> bool:
    """True for such a model with one module, whose code would pool and normalise."""
    only = modules.content[0] if len(modules.content) == 1 else None
    return isinstance(only, dict) and only.get("type") == CUSTOM and not only.get("path") and has_tasks(folder)


def task_pooling(folder: Path) -> PoolingMode | None:
    """Pooling of such a model without `modules.json`, by its authors' code. None: another model."""
    file = JsonFile.read(folder / "config.json", root=folder)
    if file is None or not has_tasks(folder):
        return None
    return "lasttoken" if file.content.get("model_type") == _V5 else "mean"


def with_task_adapters(folder: ModelFolder) -> ModelFolder:
    """Add the adapters of the tasks and their prompts; return any other folder unchanged.

    Raises:
        ConfigError: The folder of an adapter is missing.
    """
    if not has_tasks(folder.body):
        return folder
    if folder.config.get("model_type") == V3:
        return _with_v3_tasks(folder)
    tasks = folder.config["task_names"]
    adapters = tuple(AdapterSpec(task, folder.body / "adapters" / task) for task in tasks)
    for adapter in adapters:
        assert adapter.folder is not None
        if not adapter.folder.is_dir():
            raise ConfigError(
                f"config.json: task_names has {adapter.name!r}, and there is no folder adapters/{adapter.name}"
            )
    usual = _V5_USUAL if _V5_USUAL in tasks else tasks[0]
    prompts, choices = {**_V5_PROMPTS, **folder.prompts}, dict.fromkeys(("", *_V5_PROMPTS), usual)
    for task in tasks:
        endings = {"": "document", ".query": "query", ".document": "document", ".passage": "document"}
        for ending, role in endings.items():
            prompts[f"{task}{ending}"] = prompts[role]
            choices[f"{task}{ending}"] = task
    return replace(folder, adapters=adapters, adapter_of=choices, prompts=prompts, default_prompt=prompts["document"])


def _with_v3_tasks(folder: ModelFolder) -> ModelFolder:
    file = JsonFile("config.json", folder.config)
    folders: Mapping[str, Path | None] = _native_v3_tasks(folder.body, file)
    if folder.config.get(STACKED):
        folders = dict.fromkeys(folder.config["lora_adaptations"])
    tasks = [*folders]
    usual = {task: _V3_PROMPTS.get(task, "") for task in tasks}
    prompts = {**usual, **file.get("task_instructions", dict, {}), **folder.prompts}
    if wrong := [name for name, text in prompts.items() if not isinstance(text, str)]:
        raise ConfigError(f"config.json: task_instructions[{wrong[0]!r}] must be a text")
    choices = {task: task for task in tasks}
    for role, task in _V3_ROLES.items():
        if task in tasks:
            prompts.setdefault(role, prompts[task])
            choices[role] = task
    adapters = tuple(AdapterSpec(task, place) for task, place in folders.items())
    return replace(folder, adapters=adapters, adapter_of=choices, prompts=prompts)


def _native_v3_tasks(folder: Path, config: JsonFile) -> dict[str, Path]:
    """Return the folder of each task's adapter, in the layout of jina-embeddings-v3-hf; empty for another model."""
    if config.content.get("model_type") != V3:
        return {}
    places = {task: folder / task.replace(".", "_").replace("-", "_") for task in _V3_TASKS}
    return {task: place for task, place in places.items() if (place / ADAPTER_SETTINGS).is_file()}


def _is_v3(config: Mapping[str, Any]) -> bool:
    return config.get("architectures") == [_V3_CLASS] and config.get("model_type") == "xlm-roberta"


def _names(file: JsonFile, field: str) -> list[str]:
    names: list[str] = file.get(field, list, [])
    if not names or len({*map(str, names)}) != len(names) or not all(map(_is_name, names)):
        raise ConfigError(f"{file.name}: {field}={names!r} must be different names of tasks")
    if wrong := [name for name in names if "/" in name or name.startswith(".")]:
        raise ConfigError(f"{file.name}: {field} has {wrong[0]!r}, which is no name of a task")
    return names


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name != ""
