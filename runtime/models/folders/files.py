"""Checks of a model folder's files before transformers reads them.

For a missing or damaged file, transformers either makes something up (such as an empty vocabulary) or raises an error
without the file's name.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import CONFIG_MAPPING
from transformers import __version__ as transformers_version

from staged_pool.runtime.models.folders.foreign_formats import VOCABULARIES, quantised_message
from staged_pool.runtime.models.folders.rope import check_rope
from staged_pool.runtime.models.folders.unsupported_classes import check_class
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.stages.errors import ConfigError

_WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")

FIRST_VERSION: Final = {"gte": "5.18", "nomic_bert": "5.5", "embedding_gemma2_text": "5.23"}
"""First transformers version with a `model_type` that the oldest supported version lacks."""

_WEIGHT_NAME: Final = re.compile(r"weight|W_q", re.ASCII)
"""Part of a weight matrix's tensor name, in every quantisation method."""
_INTEGER_TYPES: Final = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
"""Integer types of safetensors; no weight matrix has one unless it is quantised."""
_SCALE_ENDINGS: Final = ("_scale", "_scale_inv", "_scales")
"""Name endings of the scale factors of FP8 weights."""

_POINTER: Final = b"version https://git-lfs"
_ZIP: Final = b"PK\x03\x04"
_PICKLE: Final = b"\x80"


def check_files(folder: ModelFolder, *, own_code: bool = False) -> None:
    """Reject a folder with missing, damaged or unsupported files.

    Args:
        folder: The settings read from the folder.
        own_code: True if the folder's own Python code may run.

    Raises:
        ConfigError: Names the file and the fault.
    """
    if folder.architecture != "static embedding":
        _check_architecture(folder, own_code=own_code)
        check_class(folder, own_code=own_code)
        check_rope(folder.config)
    _check_weights(folder.body)
    if folder.heads and not any((folder.body / name).is_file() for name in VOCABULARIES):
        raise ConfigError(f"{folder.body}: no tokenizer, neither tokenizer.json nor a vocabulary such as vocab.txt")


def weight_files(body: Path) -> list[str]:
    """Names of the weight files that transformers would load, by its own order of preference.

    Raises:
        ConfigError: The index names a file that is missing or outside the folder.
    """
    for whole in _WEIGHTS:
        if (body / whole).is_file():
            return [whole]
        if (index := JsonFile.read(body / f"{whole}.index.json", root=body)) is not None:
            return _shards_of(body, index)
    return []


def check_json(body: Path, *names: str) -> None:
    """Reject a folder if one of these files is not valid JSON.

    Raises:
        ConfigError: Names the file.
    """
    for name in names:
        JsonFile.read(body / name, root=body)


def check_vocabulary(tokenizer: Tokenizer, rows: int) -> None:
    """Reject a tokenizer whose vocabulary does not fit the model.

    Args:
        tokenizer: The folder's tokenizer.
        rows: Rows of the model's token embedding. Added tokens may lie beyond them; a text with such a token is
            rejected later.

    Raises:
        ConfigError: The vocabulary is empty, or larger than the embedding.
    """
    words, added = tokenizer.get_vocab_size(with_added_tokens=False), len(tokenizer.get_added_tokens_decoder())
    if words <= added:
        raise ConfigError("the tokenizer has no words: its vocabulary is missing or empty")
    if words > rows:
        raise ConfigError(
            f"the tokenizer has {words} tokens, but the weights have only {rows}: they belong to different models"
        )


def _check_architecture(folder: ModelFolder, *, own_code: bool) -> None:
    file = JsonFile("config.json", folder.config)
    kind = file.get("model_type", str, None)
    if kind is None:
        raise ConfigError("config.json: model_type is missing, so the architecture is not known")
    if kind not in CONFIG_MAPPING and not folder.config.get("auto_map"):
        known = f"; {FIRST_VERSION[kind]} and newer know it" if kind in FIRST_VERSION else ""
        raise ConfigError(
            f"config.json: model_type={kind!r} is not known to transformers {transformers_version}{known}"
        )
    if kind not in CONFIG_MAPPING and not own_code:
        raise ConfigError(
            f"config.json: auto_map={folder.config['auto_map']!r} asks for the folder's own code, which is not run "
            "unless trust_remote_code (--trust-remote-code) is set"
        )


def _check_weights(body: Path) -> None:
    if (body / "adapter_config.json").is_file():
        raise ConfigError(
            "adapter_config.json: the folder has an adapter and weights of its own: remove the one that is not wanted"
        )
    for name in weight_files(body):
        _check_shard(body / name, name)


def _shards_of(body: Path, index: JsonFile) -> list[str]:
    named = index.get("weight_map", dict, {})
    if not named:
        raise ConfigError(f"{index.name}: weight_map is missing or empty")
    shards = sorted(set(map(str, named.values())))
    for name in shards:
        # Only the name is checked: in the hub's cache the file itself is a symbolic link out of the folder.
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise ConfigError(f"{index.name}: {name!r} leads out of the model folder")
        if not (body / name).is_file():
            raise ConfigError(f"{index.name}: names {name!r}, which does not exist")
    return shards


def _check_shard(path: Path, name: str) -> None:
    with path.open("rb") as file:
        beginning = file.read(len(_POINTER))
    if not beginning:
        raise ConfigError(f"{name}: the file is empty")
    if beginning == _POINTER:
        raise ConfigError(f"{name}: is a Git LFS pointer, not the weights: fetch them with `git lfs pull`")
    if path.suffix != ".safetensors":
        _check_pickle(path, name, beginning)
        return
    try:
        with safe_open(path, "numpy") as stored:  # reads the header and checks it against the file's size
            types = {key: str(stored.get_slice(key).get_dtype()) for key in stored.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ConfigError(f"{name}: the weights are damaged: {error}") from error
    _check_types(types, name)


def _check_pickle(path: Path, name: str, beginning: bytes) -> None:
    """Reject a file that torch did not write: neither a ZIP archive nor a bare pickle."""
    if beginning.startswith(_ZIP):
        if not zipfile.is_zipfile(path):
            raise ConfigError(f"{name}: the weights are damaged: the file ends too early")
        _check_types(_pickled_types(path), name)
    elif not beginning.startswith(_PICKLE):
        raise ConfigError(f"{name}: is not a weights file written by torch")


def _pickled_types(path: Path) -> dict[str, str]:
    """Read each tensor's type from a pickle, without its values; empty if it holds more than tensors."""
    try:
        content = torch.load(path, map_location="meta", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, LookupError, ValueError, TypeError, EOFError, AttributeError):
        return {}  # loading the weights later reports the fault
    if not isinstance(content, dict):
        return {}
    whole = {
        torch.int8: "I8", torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
        torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    }  # fmt: skip
    return {key: whole.get(value.dtype, "") for key, value in content.items() if isinstance(value, torch.Tensor)}


def _check_types(types: Mapping[str, str], name: str) -> None:
    """Reject quantised weights that `config.json` does not declare.

    transformers would multiply with the bare integers, without their scale.

    Raises:
        ConfigError: Names one of them.
    """
    for key, kind in types.items():
        scaled = kind.startswith("F8") and any(f"{key}{end}" in types for end in _SCALE_ENDINGS)
        if scaled or (kind in _INTEGER_TYPES and _WEIGHT_NAME.search(key)):
            raise ConfigError(quantised_message(f"{name}: {key}", f"numbers of type {kind}"))
