"""Adapter folders (LoRA of peft): one folder of links is composed of the adapter's files and those of its base model.

The composed folder looks like that of the trained model. Its transformer's folder has one more subfolder, `ADAPTER`,
whose weights are merged at load. peft is not needed, and none of the adapter's code runs.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from staged_pool.runtime.models.folders.foreign_formats import VOCABULARIES, WEIGHT_FILES
from staged_pool.runtime.models.specs.inner_path import leads_out
from staged_pool.runtime.models.specs.json_file import MOST_LABELS, JsonFile, shown
from staged_pool.runtime.models.specs.lfs_pointer import check_fetched
from staged_pool.stages.errors import ConfigError

ADAPTER: Final = "adapter"
"""Subfolder with the adapter in the folder of a composed model's transformer."""
SETTINGS: Final = "adapter_config.json"
WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")

TOKENIZER_FILES: Final = (
    *VOCABULARIES, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_PROCESSOR: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")

_OF_CHAIN: Final = re.compile(r"^(modules|sentence_.*_config|config_sentence_transformers)\.json$|^README\.md$")
"""Files of a base model's chain of modules. An adapter with a chain of its own does not need them."""

_HARMLESS: Final = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config", "megatron_core",
    "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora",
})  # fmt: skip
"""Fields that are read, or that matter only in training. Any other field must be unset."""

_INITIAL: Final = ("gaussian", "eva", "orthogonal")
"""Initial values of adapters that leave the weights of the base model as they are."""

_HEADS: Final[Mapping[str, str]] = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
}
"""Ending of the class that was trained, by `task_type`."""
_AS_BASE: Final = (None, "FEATURE_EXTRACTION", "CAUSAL_LM", "SEQ_2_SEQ_LM")
_ENDING: Final = re.compile(r"(For[A-Z]\w*|LMHeadModel|EncoderModel|Model)$")
_LAST_LAYER: Final = re.compile(r"(^|\.)(classifier|score|out_proj|logits_proj|classifier\.out_proj)\.weight$")
"""Name of the weight with a row for each label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFolder:
    """A folder with an adapter, and the base model that it names."""

    path: Path
    body: Path
    """The folder of the adapter's files: `path`, or that of the first module in `modules.json`."""
    base: str
    """Folder or hub id of the base model."""
    revision: str | None
    task: str | None


def find_adapter(path: Path) -> AdapterFolder | None:
    """Read which base model an adapter needs. None: the folder has no adapter, or has weights of its own.

    Raises:
        ConfigError: The adapter is of an unsupported kind, or a file is missing or malformed.
    """
    body = path / _first_module(path)
    file = JsonFile.read(body / SETTINGS, root=path)
    if file is None or any((body / name).is_file() for name in WEIGHT_FILES):
        return None
    check_adapter_settings(file)
    base = file.get("base_model_name_or_path", str, "")
    if not base:
        raise ConfigError(f"{file.name}: base_model_name_or_path is missing, so the base model is not known")
    weights = next((name for name in WEIGHTS if (body / name).is_file()), None)
    if weights is None:
        raise ConfigError(f"{path}: no adapter_model.safetensors beside {file.name}")
    check_fetched(body / weights, weights)
    task = file.get("task_type", str, None)
    if task not in (*_AS_BASE, *_HEADS):
        raise ConfigError(f"{file.name}: task_type={task!r} is not supported, only {', '.join(_HEADS)} and embeddings")
    inside = (path / base).is_dir()
    return AdapterFolder(
        path=path,
        body=body,
        base=str(path / base) if inside else base,
        revision=file.get("revision", str, None) or None,
        task=task,
    )


def compose(adapter: AdapterFolder, base: Path) -> Path:
    """Compose a folder of links to the files of an adapter and its base model.

    It is removed at exit.

    An adapter with `modules.json` has the modules after the transformer; otherwise those of the base model are used.
    Its own tokenizer and image processor go before those of the base model.

    Raises:
        ConfigError: The base model is an adapter too, or the folder cannot be written.
    """
    if find_adapter(base) is not None:
        raise ConfigError(f"{SETTINGS}: the base model {adapter.base} is an adapter too: merge one of them first")
    own, inner = _first_module(adapter.path), _first_module(base)
    body = own
    if (adapter.path / "modules.json").is_file():
        files = _tree(adapter.path)
        bases = {Path(body) / file.name: file for file in _files(base / inner) if not _OF_CHAIN.search(file.name)}
    else:
        body = inner
        files = {Path(body) / file.name: file for file in _files(adapter.body) if file.name != "README.md"}
        files |= {Path("README.md"): adapter.path / "README.md"} if (adapter.path / "README.md").is_file() else {}
        bases = _tree(base)
    for group, signs in ((TOKENIZER_FILES, VOCABULARIES), (_PROCESSOR, _PROCESSOR)):
        loser = bases if any(Path(body) / sign in files for sign in signs) else files
        for name in group:
            loser.pop(Path(body) / name, None)
    for name in (SETTINGS, *WEIGHTS):
        if (file := files.pop(Path(body) / name, None)) is not None:
            files[Path(body) / ADAPTER / name] = file
    links = bases | files
    try:
        whole = _empty_folder() / adapter.path.resolve().name
        for place, file in links.items():
            (whole / place).parent.mkdir(parents=True, exist_ok=True)
            (whole / place).symlink_to(file.absolute())
        if adapter.task in _HEADS and Path(body) / "config.json" not in files:
            _write_head(whole / body / "config.json", adapter)
    except OSError as error:
        raise ConfigError(f"{adapter.path}: cannot be joined with its base model: {error}") from error
    return whole


def _write_head(config: Path, adapter: AdapterFolder) -> None:
    """Write a `config.json` with the trained class and its labels, instead of the base model's."""
    content = JsonFile.read(config, root=config.parent)
    if content is None:
        return  # the reader of the folder says so
    given: dict[str, Any] = dict(content.content)
    names = given.get("architectures") or []
    # To look for an ending of a text that is no name may take hours.
    is_name = len(names) == 1 and isinstance(names[0], str) and names[0].isidentifier()
    if not is_name or not _ENDING.search(names[0]):
        raise ConfigError(
            f"{SETTINGS}: the base model's config.json has architectures={shown(names)}, which must be one"
        )
    assert adapter.task is not None
    given["architectures"] = [_ENDING.sub(_HEADS[adapter.task], names[0])]
    count = _label_count(adapter)
    given.pop("num_labels", None)
    given["id2label"] = {str(place): f"LABEL_{place}" for place in range(count)}
    given["label2id"] = {f"LABEL_{place}": place for place in range(count)}
    config.unlink()
    config.write_text(json.dumps(given))


def _label_count(adapter: AdapterFolder) -> int:
    """Count the labels: the rows of the last layer of the saved head."""
    file = adapter.body / WEIGHTS[0]
    if not file.is_file():
        raise ConfigError(f"{adapter.path}: a classifier's adapter must be adapter_model.safetensors, not a pickle")
    try:
        with safe_open(file, "numpy") as stored:
            rows = [stored.get_slice(name).get_shape()[0] for name in stored.keys() if _LAST_LAYER.search(name)]  # noqa: SIM118
    except SafetensorError as error:
        raise ConfigError(f"{file}: the weights are damaged: {error}") from error
    if not rows:
        raise ConfigError(
            f"{file.name}: has no head of labels (classifier or score), and adapter_config.json has "
            f"task_type={adapter.task!r}: save it with modules_to_save"
        )
    if not 1 <= rows[-1] <= MOST_LABELS:
        raise ConfigError(f"{file.name}: its head of labels has {rows[-1]} rows, which must be from 1 to {MOST_LABELS}")
    return int(rows[-1])


def check_adapter_settings(file: JsonFile) -> None:
    """Reject adapters of other kinds, and settings that are not understood.

    Raises:
        ConfigError: Names the field.
    """
    kind = file.get("peft_type", str, None)
    if kind is None and "model_class" in file.content:
        raise ConfigError(
            f"{file.name}: this is an adapter of the library adapters (AdapterHub), which is not supported: merge it "
            "(merge_adapter), save the whole model, and serve that folder; one that cannot be merged cannot be served"
        )
    if kind != "LORA":
        raise ConfigError(
            f"{file.name}: peft_type={kind!r} is not supported, only 'LORA': merge the adapter into its base model "
            "(merge_and_unload of peft), save the result, and serve that folder"
        )
    start = file.content.get("init_lora_weights", True)
    if not isinstance(start, bool | None) and start not in _INITIAL:
        raise ConfigError(
            f"{file.name}: init_lora_weights={start!r} changes the weights of the base model, which is not supported: "
            "save the adapter as a plain LoRA (path_initial_model_for_weight_conversion of peft), or merge it"
        )
    if file.content.get("bias", "none") not in ("none", "all", "lora_only"):
        raise ConfigError(f"{file.name}: bias={file.content['bias']!r} is not known, only none, all, lora_only")
    if unknown := sorted(name for name, value in file.content.items() if value and name not in _HARMLESS):
        raise ConfigError(f"{file.name}: {unknown[0]}={file.content[unknown[0]]!r} is not supported")


def _first_module(path: Path) -> str:
    """Folder of the first module in `modules.json`, relative to `path`; empty without such a file."""
    modules = JsonFile.read(path / "modules.json", root=path, kind=list)
    first = modules.content[0] if modules is not None and modules.content else {}
    folder = first.get("path", "") if isinstance(first, Mapping) else ""
    if not isinstance(folder, str) or leads_out(folder):
        raise ConfigError(f"modules.json[0]: path={folder!r} leads out of the model folder")
    return folder


def _files(folder: Path) -> Iterable[Path]:
    return [file for file in sorted(folder.iterdir()) if file.is_file()]


def _tree(path: Path) -> dict[Path, Path]:
    """The files of a folder and of its direct subfolders, by relative name."""
    folders = [path, *(each for each in sorted(path.iterdir()) if each.is_dir() and not each.name.startswith("."))]
    return {file.relative_to(path): file for folder in folders for file in _files(folder)}


def _empty_folder() -> Path:
    """Make a temporary folder, which is removed when this process ends."""
    folder, owner = Path(tempfile.mkdtemp(prefix="staged-pool-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
