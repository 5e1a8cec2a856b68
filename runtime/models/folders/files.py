"""Checks of a model folder's files before transformers reads them.

For a missing or damaged file, transformers either makes something up (such as an empty vocabulary) or raises an error
without the file's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer
from transformers import CONFIG_MAPPING
from transformers import __version__ as transformers_version

from staged_pool.runtime.models.folders.claims import check_claims
from staged_pool.runtime.models.folders.foreign_formats import VOCABULARIES, quantised_message
from staged_pool.runtime.models.folders.rope import check_rope
from staged_pool.runtime.models.folders.stored_tensors import StoredTensor, read_shard
from staged_pool.runtime.models.folders.token_ids import check_token_ids
from staged_pool.runtime.models.folders.unsupported_classes import check_class
from staged_pool.runtime.models.folders.weight_files import weight_files
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.lfs_pointer import check_fetched
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.stages.errors import ConfigError

FIRST_VERSION: Final = {"gte": "5.18", "nomic_bert": "5.5", "embedding_gemma2_text": "5.23"}
"""First transformers version with a `model_type` that the oldest supported version lacks."""

_WEIGHT_NAME: Final = re.compile(r"weight|W_q", re.ASCII)
"""Part of a weight matrix's tensor name, in every quantisation method."""
_INTEGER_TYPES: Final = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
"""Integer types of safetensors; no weight matrix has one unless it is quantised."""
_SCALE_ENDINGS: Final = ("_scale", "_scale_inv", "_scales")
"""Name endings of the scale factors of FP8 weights."""

_CHAT_TEMPLATE: Final = "chat_template.jinja"
_WHOLE_TOKENIZER: Final = VOCABULARIES[0]
_MORE_VOCABULARY: Final = ("merges.txt", "added_tokens.json", "special_tokens_map.json")
"""Files that tokenizers read beside a vocabulary."""

_EMPTY: Final = (("",), ("", ""))
"""Inputs whose ids are the tokens around every text."""


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
    tensors = _read_tensors(folder.body)
    if folder.architecture != "static embedding":
        check_claims(folder.config, tensors)
    check_token_ids(folder.body)
    if folder.heads:
        _check_tokenizer_files(folder.body)


def _check_tokenizer_files(body: Path) -> None:
    if (body / _CHAT_TEMPLATE).is_file():
        check_fetched(body / _CHAT_TEMPLATE, _CHAT_TEMPLATE)
    found = [name for name in (*VOCABULARIES, *_MORE_VOCABULARY) if (body / name).is_file()]
    if not any(name in VOCABULARIES for name in found):
        raise ConfigError(f"{body}: no tokenizer, neither tokenizer.json nor a vocabulary such as vocab.txt")
    # Beside tokenizer.json, other vocabularies are not read. Nobody need fetch them.
    for name in found[:1] if found[0] == _WHOLE_TOKENIZER else found:
        check_fetched(body / name, name)


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
        ConfigError: The vocabulary is empty, or larger than the embedding; or a token around every text is beyond it.
    """
    words, added = tokenizer.get_vocab_size(with_added_tokens=False), len(tokenizer.get_added_tokens_decoder())
    if words <= added:
        raise ConfigError("the tokenizer has no words: its vocabulary is missing or empty")
    if words > rows:
        raise ConfigError(
            f"the tokenizer has {words} tokens, but the weights have only {rows}: they belong to different models"
        )
    around = [i for given in _EMPTY for i in tokenizer.encode(*given).ids]
    if around and max(around) >= rows:
        raise ConfigError(
            f"tokenizer.json: post_processor puts the token {max(around)} around texts, but the weights have {rows}"
        )


def _check_architecture(folder: ModelFolder, *, own_code: bool) -> None:
    file = JsonFile("config.json", folder.config)
    kind = file.get("model_type", str, None)
    if kind is None:
        raise ConfigError(
            "config.json: model_type is missing, so the architecture is not known: if the class is one of the authors' "
            "program (PyTorchModelHubMixin), save its model with a class of transformers (save_pretrained)"
        )
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


def _read_tensors(body: Path) -> dict[str, StoredTensor]:
    """Read the shapes and types of all weights, and check them."""
    if (body / "adapter_config.json").is_file():
        raise ConfigError(
            "adapter_config.json: the folder has an adapter and weights of its own: remove the one that is not wanted"
        )
    found: dict[str, StoredTensor] = {}
    for name in weight_files(body):
        tensors = read_shard(body / name, name)
        _check_types({key: tensor.kind for key, tensor in tensors.items()}, name)
        found |= tensors
    return found


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
