"""Load the tokenizer of a model folder.

Token ids are those of `tokenizer.json` where the folder has one. What its class in transformers knows beyond them is
read from `AutoTokenizer`: the chat template, the names of special tokens, and what the model is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import transformers
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import is_protobuf_available, is_sentencepiece_available

from staged_pool.runtime.models.checkpoint.quiet_loading import LOADER_ERRORS, TOKENIZER_FILES, quiet, unusable
from staged_pool.runtime.models.folders.files import check_json
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.runtime.models.tokenizing.probes import PROBES, differences, encoder
from staged_pool.runtime.models.tokenizing.settings import SETTINGS, TokenizerSettings, read_settings
from staged_pool.runtime.models.tokenizing.siglip import check_siglip_tokenizer, is_siglip_tokenizer, lower_texts
from staged_pool.runtime.models.tokenizing.tokenizer_file import (
    TOKENIZER_FILE,
    add_declared_tokens,
    add_ends,
    check_mistral_fix,
    contradicted_rules,
    read_tokenizer_file,
    without_call_settings,
)
from staged_pool.runtime.requests import Side
from staged_pool.stages.errors import ConfigError

_SANE_TOKENS: Final = 10**9
"""Tokenizers that know no longest input say a number beyond this."""


_ANY_CLASS: Final = "TokenizersBackend"
"""The class of transformers that wraps any file. It gives no token types; that of version 4, which version 5 takes for
the same, gave them."""


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """What a folder says about turning text into tokens."""

    backend: Tokenizer
    """Neither cuts nor pads."""
    max_tokens: int | None
    """The longest input that it declares. None: it declares none."""
    gives_types: bool
    """Whether the model is given token types."""
    chat_template: str | None
    """Jinja that makes one text of a conversation."""
    special_tokens: Mapping[str, object]
    """The text of each special token by its name, such as `bos_token`."""
    padding: int | None = None
    """The token that fills texts up. None: there is none."""
    padding_side: str = "right"
    masks_padding: bool = True
    """Whether the model is told which tokens are padding."""
    truncation_side: Side = "right"
    """The end that is cut off a text where a request does not say it."""
    cleans_up: bool = False
    """Whether blanks before punctuation are removed from decoded text."""
    notes: tuple[str, ...] = ()
    """What was decided between the files of the folder, for the log."""


def load_tokenizer(folder: ModelFolder, *, own_code: bool = False) -> LoadedTokenizer:
    """Load the tokenizer of a folder.

    Args:
        folder: What was read of it.
        own_code: Whether code of the folder's own may run.

    Raises:
        ConfigError: There is none that can be used, only one in Python, or a setting is not supported.
    """
    body = folder.body
    check_json(body, *TOKENIZER_FILES[1:])
    settings = read_settings(body)
    from_file = read_tokenizer_file(body)
    known, notes = _class_of(folder, settings, own_code=own_code, has_file=from_file is not None)
    # Some versions of transformers put the class that wraps any file in the place of one that they cannot build.
    stands_in = type(known).__name__ == _ANY_CLASS and settings.class_name not in (None, _ANY_CLASS)
    is_any = stands_in or bool(notes)
    if from_file is None:
        if not known.is_fast:
            raise ConfigError(f"{body}: {type(known).__name__} is written in Python; a {TOKENIZER_FILE} is needed")
        backend: Tokenizer = known.backend_tokenizer
        side = without_call_settings(backend)
    else:
        backend, side = from_file
        notes = (*notes, *settings.notes, *_complete(backend, settings, _rows(folder.config)))
        if note := lower_texts(backend, type(known).__name__):
            notes = (*notes, note)
        backend.encode_special_tokens = False  # so that the ids of special tokens can be compared
        notes = (*notes, *_compare(body, backend, known))
    notes = (*notes, *add_ends(backend, settings, known.special_tokens_map))
    # The probes above and those of special tokens are of ordinary text.
    backend.encode_special_tokens = settings.splits_special_tokens
    declared, templates = known.model_max_length, known.chat_template
    special_tokens = {
        name: text
        for name, text in known.special_tokens_map.items()
        if isinstance(text, list) or settings.is_named(str(text)) or backend.token_to_id(str(text)) is not None
    }
    padding = special_tokens.get("pad_token")
    return LoadedTokenizer(
        backend=backend,
        max_tokens=int(declared) if 0 < declared < _SANE_TOKENS else None,
        gives_types="token_type_ids" in known.model_input_names
        or (is_any and not settings.names_inputs and _takes_types(folder.config)),
        chat_template=templates.get("default") if isinstance(templates, dict) else templates,
        special_tokens=special_tokens,
        padding=None if padding is None else backend.token_to_id(str(padding)),
        padding_side=known.padding_side,
        masks_padding="attention_mask" in known.model_input_names,
        truncation_side=settings.truncation_side or side or "right",
        cleans_up=settings.cleans_up and (settings.cleans_up_bpe or type(backend.model).__name__ != "BPE"),
        notes=notes,
    )


def _class_of(
    folder: ModelFolder, settings: TokenizerSettings, *, own_code: bool, has_file: bool
) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer as transformers builds it, and a note for the log where another class stands in for its own.

    Where `tokenizer.json` is there and its class cannot be built, the one that only wraps the file stands in.
    """
    body = folder.body
    given: dict[str, Any] = {"local_files_only": True, **settings.rewritten}
    with quiet(), unusable(folder, "the tokenizer"):
        if is_siglip_tokenizer(body):
            return PreTrainedTokenizerFast.from_pretrained(body, **given), ()
        try:
            return AutoTokenizer.from_pretrained(body, trust_remote_code=own_code, **given), ()
        except LOADER_ERRORS as error:
            if not has_file:
                _check_readable(body, settings.class_name)
            if not has_file or "trust_remote_code" in str(error):
                raise
            known = PreTrainedTokenizerFast.from_pretrained(body, **given)
            said = " ".join(str(error).split())
            return known, (f"transformers cannot build the tokenizer's class, {TOKENIZER_FILE} is read alone: {said}",)


def _check_readable(body: Path, class_name: str | None) -> None:
    """Say why a folder without `tokenizer.json` has no tokenizer here, where that is known.

    Raises:
        ConfigError: The package that reads its vocabulary is not installed, or its class is of no known name.
    """
    spelled = next((file.name for file in sorted(body.glob("*.model")) if file.name != "tiktoken.model"), None)
    ranks = next((file.name for file in sorted(body.glob("*tiktoken*"))), None)
    missing = [
        (file, package)
        for file, package, there in (
            (spelled, "sentencepiece", is_sentencepiece_available()),
            (spelled, "protobuf", is_protobuf_available()),
            (ranks, "tiktoken", find_spec("tiktoken") is not None),
        )
        if file is not None and not there
    ]
    if missing:
        file, packages = missing[0][0], " ".join(package for _, package in missing)
        raise ConfigError(
            f"{body}: the tokenizer cannot be loaded: reading {file} needs packages that are not installed: run "
            f"`pip install {packages}`, or save the tokenizer as {TOKENIZER_FILE}"
        )
    if class_name is not None and not any(hasattr(transformers, name) for name in (class_name, f"{class_name}Fast")):
        raise ConfigError(
            f"{SETTINGS}: tokenizer_class={class_name!r} is not known to transformers {transformers.__version__}, and "
            f"there is no {TOKENIZER_FILE}"
        )


def _complete(backend: Tokenizer, settings: TokenizerSettings, rows: int | None) -> Iterator[str]:
    """Add to the file's tokenizer what the settings ask for; notes of it, and of what they contradict."""
    if settings.wants_mistral_fix:
        check_mistral_fix(backend)
    yield from add_declared_tokens(backend, settings.declared, rows)
    yield from contradicted_rules(backend, settings.rules)


def _compare(body: Path, backend: Tokenizer, known: Any) -> Iterator[str]:
    """Compare the file's tokenizer with the class of transformers.

    Raises:
        ConfigError: The class is written in Python and does something else with texts, or it is SigLIP's and does.
    """
    if is_siglip_tokenizer(body):
        check_siglip_tokenizer(backend)
        return
    name = type(known).__name__
    special = {"the text of special tokens": tuple(f"a{text}b {text}" for text in _texts(known.special_tokens_map))}
    if not known.is_fast:
        found = differences(
            encoder(backend), lambda texts: [known(t, add_special_tokens=False)["input_ids"] for t in texts]
        )
        if found:
            raise ConfigError(
                f"{SETTINGS}: tokenizer_class={name!r} is written in Python, and reads {', '.join(found)} otherwise "
                f"than {TOKENIZER_FILE}: name the class of the file, such as PreTrainedTokenizerFast"
            )
        return
    other: Tokenizer = known.backend_tokenizer
    without_call_settings(other)
    other.encode_special_tokens = False
    if found := differences(encoder(backend), encoder(other), more=special):
        kinds = "all texts" if len(found) > len(PROBES) else ", ".join(found)
        yield f"{name} of transformers reads {kinds} otherwise than {TOKENIZER_FILE}, which is followed"
    around = [each.encode("x").ids for each in (backend, other)]
    pairs = [each.encode("x", "x").ids for each in (backend, other)]
    if not found and (around[0] != around[1] or pairs[0] != pairs[1]):
        yield f"{name} of transformers puts other special tokens around texts than {TOKENIZER_FILE}, which is followed"


def _texts(special_tokens: Mapping[str, object]) -> Sequence[str]:
    return [str(text) for each in special_tokens.values() for text in (each if isinstance(each, list) else [each])]


def _takes_types(config: Mapping[str, Any]) -> bool:
    """Whether the model tells the texts of a pair apart by token types."""
    types = config.get("type_vocab_size")
    return isinstance(types, int) and types > 1


def _rows(config: Mapping[str, Any]) -> int | None:
    """Rows of the token embedding, as far as config.json says it."""
    for part in (config, config.get("text_config"), config.get("vlm_config")):
        if isinstance(part, Mapping) and isinstance(size := part.get("vocab_size"), int):
            return size
    return None
