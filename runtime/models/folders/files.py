"""Check the files of a model folder before transformers reads them.

Where a file is missing or damaged, transformers makes something up (an empty vocabulary, which knows no word), or says
so without the name of the file.
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

from staged_pool.runtime.models.folders.foreign_formats import quantised
from staged_pool.runtime.models.folders.rope import check_rope
from staged_pool.runtime.models.folders.unsupported_classes import check_class
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.stages.errors import ConfigError

_WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")

_VOCABULARIES: Final = (
    "tokenizer.json", "vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model",
    "spm.model", "tekken.json",
)  # fmt: skip
"""What a tokenizer can be made of, under the names that the classes of transformers know."""

FIRST_VERSION: Final = {"gte": "5.18", "nomic_bert": "5.5"}
"""The first transformers with classes for a `model_type`, where the oldest that is supported has none."""

_QUANTISED: Final = re.compile(r"weight|W_q", re.ASCII)
"""A part of the names of tensors that are multiplied with, in every way of quantising them."""
_WHOLE_NUMBERS: Final = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
"""Types in safetensors of which no layer has its weights."""
_SCALES: Final = ("_scale", "_scale_inv", "_scales")
"""How the names of factors end that belong to weights of 8 bits."""

_POINTER: Final = b"version https://git-lfs"
_ZIP: Final = b"PK\x03\x04"
_PICKLE: Final = b"\x80"


def check_files(folder: ModelFolder, *, own_code: bool = False) -> None:
    """Reject a folder whose files cannot be those of a model that is read here.

    Args:
        folder: What was read of it.
        own_code: Whether code of the folder's own may run.

    Raises:
        ConfigError: Names the file and what is wrong with it.
    """
    _check_architecture(folder, own_code=own_code)
    check_class(folder, own_code=own_code)
    check_rope(folder.config)
    _check_weights(folder.body)
    if folder.heads and not any((folder.body / name).is_file() for name in _VOCABULARIES):
        raise ConfigError(f"{folder.body}: no tokenizer, neither tokenizer.json nor a vocabulary such as vocab.txt")


def weight_files(body: Path) -> list[str]:
    """The files that transformers takes the weights from: the first in its order."""
    for whole in _WEIGHTS:
        if (body / whole).is_file():
            return [whole]
        if (index := JsonFile.read(body / f"{whole}.index.json", root=body)) is not None:
            return _shards_of(body, index)
    return []


def check_json(body: Path, *names: str) -> None:
    """Say which of these files is not JSON, where one of them is not.

    Raises:
        ConfigError: Names the file.
    """
    for name in names:
        JsonFile.read(body / name, root=body)


def check_vocabulary(tokenizer: Tokenizer, rows: int) -> None:
    """Refuse a tokenizer that cannot be that of a model.

    Args:
        tokenizer: The folder's own.
        rows: Of the model's token embedding. Tokens that were added later may be beyond them: a text that holds one is
            refused then.

    Raises:
        ConfigError: It knows no words, or more than the model.
    """
    words, added = tokenizer.get_vocab_size(with_added_tokens=False), len(tokenizer.get_added_tokens_decoder())
    if words <= added:
        raise ConfigError("the tokenizer knows no words: its vocabulary is missing or empty")
    if words > rows:
        raise ConfigError(f"the tokenizer knows {words} tokens, but the weights only {rows}: they are of two models")


def _check_architecture(folder: ModelFolder, *, own_code: bool) -> None:
    file = JsonFile("config.json", folder.config)
    kind = file.get("model_type", str, None)
    if kind is None:
        raise ConfigError("config.json: model_type is missing, so the architecture is not known")
    if kind not in CONFIG_MAPPING and not folder.config.get("auto_map"):
        known = f", but to {FIRST_VERSION[kind]} and newer" if kind in FIRST_VERSION else ""
        raise ConfigError(
            f"config.json: model_type={kind!r} is not known to transformers {transformers_version}{known}"
        )
    if kind not in CONFIG_MAPPING and not own_code:
        raise ConfigError(
            f"config.json: auto_map={folder.config['auto_map']!r} asks for code of its own, which is not run unless "
            "trust_remote_code (--trust-remote-code) is set"
        )


def _check_weights(body: Path) -> None:
    if (body / "adapter_config.json").is_file():
        raise ConfigError("adapter_config.json: the folder holds an adapter; merge it into the weights of its model")
    for name in weight_files(body):
        _check_shard(body / name, name)


def _shards_of(body: Path, index: JsonFile) -> list[str]:
    named = index.get("weight_map", dict, {})
    if not named:
        raise ConfigError(f"{index.name}: weight_map is missing or empty")
    shards = sorted(set(map(str, named.values())))
    for name in shards:
        if ".." in Path(name).parts or Path(name).is_absolute():  # the file itself may be a link, as in the hub's cache
            raise ConfigError(f"{index.name}: {name!r} leads out of the model folder")
        if not (body / name).is_file():
            raise ConfigError(f"{index.name}: names {name!r}, which is not there")
    return shards


def _check_shard(path: Path, name: str) -> None:
    with path.open("rb") as file:
        beginning = file.read(len(_POINTER))
    if not beginning:
        raise ConfigError(f"{name}: the file is empty")
    if beginning == _POINTER:
        raise ConfigError(f"{name}: is a pointer of Git LFS, not the weights: fetch them with `git lfs pull`")
    if path.suffix != ".safetensors":
        _check_pickle(path, name, beginning)
        return
    try:
        with safe_open(path, "numpy") as stored:  # reads the header, and compares it with the size of the file
            types = {key: str(stored.get_slice(key).get_dtype()) for key in stored.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ConfigError(f"{name}: the weights are damaged: {error}") from error
    _check_types(types, name)


def _check_pickle(path: Path, name: str, beginning: bytes) -> None:
    """Tell a file of torch, which is a ZIP archive or a bare pickle, from anything else."""
    if beginning.startswith(_ZIP):
        if not zipfile.is_zipfile(path):
            raise ConfigError(f"{name}: the weights are damaged: the file ends too early")
        _check_types(_pickled_types(path), name)
    elif not beginning.startswith(_PICKLE):
        raise ConfigError(f"{name}: is not a file of weights that torch has written")


def _pickled_types(path: Path) -> dict[str, str]:
    """The type of each tensor of a pickle, without its values; nothing where the pickle holds more than tensors."""
    try:
        content = torch.load(path, map_location="meta", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, LookupError, ValueError, TypeError, EOFError, AttributeError):
        return {}  # loading it says what is wrong
    if not isinstance(content, dict):
        return {}
    whole = {
        torch.int8: "I8", torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
        torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    }  # fmt: skip
    return {key: whole.get(value.dtype, "") for key, value in content.items() if isinstance(value, torch.Tensor)}


def _check_types(types: Mapping[str, str], name: str) -> None:
    """Reject quantised weights that `config.json` does not speak of: a class would multiply with bare numbers.

    Raises:
        ConfigError: Names one of them.
    """
    for key, kind in types.items():
        scaled = kind.startswith("F8") and any(f"{key}{end}" in types for end in _SCALES)
        if scaled or (kind in _WHOLE_NUMBERS and _QUANTISED.search(key)):
            raise ConfigError(quantised(f"{name}: {key}", f"numbers of type {kind}"))
