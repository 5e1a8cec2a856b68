"""Loader of a model folder's tokenizer.

Token ids are those of `tokenizer.json` if the folder has that file. The chat template, the names of special tokens and
the model's input names come from the tokenizer's class in transformers, by `AutoTokenizer`.
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

from staged_pool.runtime.models.checkpoint.quiet_loading import (
    LOADER_ERRORS,
    TOKENIZER_FILES,
    loading_errors,
    quiet_transformers,
)
from staged_pool.runtime.models.folders.files import check_json
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.runtime.models.tokenizing.probes import PROBE_TEXTS, differences, encoder
from staged_pool.runtime.models.tokenizing.settings import SETTINGS, TokenizerSettings, read_settings
from staged_pool.runtime.models.tokenizing.siglip import (
    check_siglip_tokenizer,
    is_siglip_tokenizer,
    is_trained_on_lowercase,
    lower_texts,
)
from staged_pool.runtime.models.tokenizing.text_settings import SpecialTexts
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

_UNLIMITED_TOKENS: Final = 10**9
"""A tokenizer without a longest input has a `model_max_length` beyond this."""


_GENERIC_CLASS: Final = "TokenizersBackend"
"""The transformers class that wraps any `tokenizer.json`.

It produces no token types, but its predecessor in transformers 4 did.
"""


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A folder's tokenizer and its settings."""

    backend: Tokenizer
    """Without truncation and padding."""
    max_tokens: int | None
    """The longest input in the tokenizer's settings, in tokens. None: not set."""
    gives_types: bool
    """True if the model takes token types."""
    chat_template: str | None
    """Jinja template that renders a conversation as one text."""
    special_tokens: SpecialTexts
    """The text of each special token by its name, such as `bos_token`."""
    padding: int | None = None
    """Id of the padding token. None: there is none."""
    padding_side: str = "right"
    masks_padding: bool = True
    """True if the attention mask hides padding from the model."""
    truncation_side: Side = "right"
    """The end that is cut off a long text unless the request names one."""
    cleans_up: bool = False
    """Remove spaces before punctuation from decoded text."""
    notes: tuple[str, ...] = ()
    """Decisions between contradicting files of the folder, for the log."""


def load_tokenizer(folder: ModelFolder, *, own_code: bool = False) -> LoadedTokenizer:
    """Load the tokenizer of a folder.

    Args:
        folder: The settings read from the folder.
        own_code: True if the folder's own Python code may run.

    Raises:
        ConfigError: There is no usable tokenizer, only one in Python, or a setting is not supported.
    """
    body = folder.body
    check_json(body, *TOKENIZER_FILES[1:])
    settings = read_settings(body)
    from_file = read_tokenizer_file(body)
    known, notes = _transformers_tokenizer(folder, settings, own_code=own_code, has_file=from_file is not None)
    # Some versions of transformers use the generic class in place of a class that they cannot build.
    is_replaced = type(known).__name__ == _GENERIC_CLASS and settings.class_name not in (None, _GENERIC_CLASS)
    is_generic = is_replaced or bool(notes)
    names = (settings.class_name, type(known).__name__)
    if is_trained_on_lowercase(folder.config.get("model_type"), names, settings.rules.get("do_lower_case")):
        own = [known.backend_tokenizer] if known.is_fast else []
        changes = [lower_texts(each) for each in (*own, *(from_file[:1] if from_file is not None else ()))]
        notes = (*notes, *filter(None, changes[-1:]))
    if from_file is None:
        if not known.is_fast:
            raise ConfigError(f"{body}: {type(known).__name__} is written in Python; a {TOKENIZER_FILE} is needed")
        backend: Tokenizer = known.backend_tokenizer
        side = without_call_settings(backend)
    else:
        backend, side = from_file
        notes = (*notes, *settings.notes, *_apply_settings(backend, settings, _embedding_rows(folder.config)))
        backend.encode_special_tokens = False  # so that the ids of special tokens can be compared
        notes = (*notes, *_compare(body, backend, known))
    notes = (*notes, *add_ends(backend, settings, known.special_tokens_map))
    # Set last: the probes above need special tokens to be recognised in text.
    backend.encode_special_tokens = settings.splits_special_tokens
    declared, templates = known.model_max_length, known.chat_template
    special_tokens = {
        name: [*map(str, text)] if isinstance(text, list) else str(text)
        for name, text in known.special_tokens_map.items()
        if isinstance(text, list) or settings.is_named(str(text)) or backend.token_to_id(str(text)) is not None
    }
    padding = special_tokens.get("pad_token")
    return LoadedTokenizer(
        backend=backend,
        max_tokens=int(declared) if 0 < declared < _UNLIMITED_TOKENS else None,
        gives_types="token_type_ids" in known.model_input_names
        or (is_generic and not settings.names_inputs and _has_token_types(folder.config)),
        chat_template=templates.get("default") if isinstance(templates, dict) else templates,
        special_tokens=special_tokens,
        padding=None if padding is None else backend.token_to_id(str(padding)),
        padding_side=known.padding_side,
        masks_padding="attention_mask" in known.model_input_names,
        truncation_side=settings.truncation_side or side or "right",
        cleans_up=settings.cleans_up and (settings.cleans_up_bpe or type(backend.model).__name__ != "BPE"),
        notes=notes,
    )


def _transformers_tokenizer(
    folder: ModelFolder, settings: TokenizerSettings, *, own_code: bool, has_file: bool
) -> tuple[Any, tuple[str, ...]]:
    """Build the tokenizer by its class in transformers.

    If that class cannot be built and the folder has `tokenizer.json`, the generic class wraps the file instead.

    Returns:
        The tokenizer, and a note for the log if the generic class replaces its own.
    """
    body = folder.body
    given: dict[str, Any] = {"local_files_only": True, **settings.rewritten}
    with quiet_transformers(), loading_errors(folder, "the tokenizer"):
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
            reason = " ".join(str(error).split())
            return known, (
                f"transformers cannot build the tokenizer's class, so only {TOKENIZER_FILE} is read: {reason}",
            )


def _check_readable(body: Path, class_name: str | None) -> None:
    """Raise the cause if a folder without `tokenizer.json` cannot be read for a known reason.

    Raises:
        ConfigError: The package that reads its vocabulary is not installed, or transformers lacks its class.
    """
    sentencepiece = next((file.name for file in sorted(body.glob("*.model")) if file.name != "tiktoken.model"), None)
    ranks = next((file.name for file in sorted(body.glob("*tiktoken*"))), None)
    missing = [
        (file, package)
        for file, package, there in (
            (sentencepiece, "sentencepiece", is_sentencepiece_available()),
            (sentencepiece, "protobuf", is_protobuf_available()),
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


def _apply_settings(backend: Tokenizer, settings: TokenizerSettings, rows: int | None) -> Iterator[str]:
    """Apply the folder's settings to the tokenizer; yield notes on changes and contradictions, for the log."""
    if settings.wants_mistral_fix:
        check_mistral_fix(backend)
    yield from add_declared_tokens(backend, settings.declared, rows)
    yield from contradicted_rules(backend, settings.rules)


def _compare(body: Path, backend: Tokenizer, known: Any) -> Iterator[str]:
    """Compare the tokenizer of the file with that of the transformers class; yield notes for the log.

    Raises:
        ConfigError: The class is written in Python or is SigLIP's, and tokenizes a text differently.
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
                f"{SETTINGS}: tokenizer_class={name!r} is written in Python and tokenizes {', '.join(found)} "
                f"differently from {TOKENIZER_FILE}: name the class of the file, such as PreTrainedTokenizerFast"
            )
        return
    other: Tokenizer = known.backend_tokenizer
    without_call_settings(other)
    other.encode_special_tokens = False
    if found := differences(encoder(backend), encoder(other), more=special):
        kinds = "all texts" if len(found) > len(PROBE_TEXTS) else ", ".join(found)
        yield f"{name} of transformers tokenizes {kinds} differently from {TOKENIZER_FILE}, which is followed"
    around = [each.encode("x").ids for each in (backend, other)]
    pairs = [each.encode("x", "x").ids for each in (backend, other)]
    if not found and (around[0] != around[1] or pairs[0] != pairs[1]):
        yield f"{name} of transformers adds other special tokens than {TOKENIZER_FILE}, which is followed"


def _texts(special_tokens: Mapping[str, object]) -> Sequence[str]:
    return [str(text) for each in special_tokens.values() for text in (each if isinstance(each, list) else [each])]


def _has_token_types(config: Mapping[str, Any]) -> bool:
    """True if the model distinguishes the texts of a pair by token types."""
    types = config.get("type_vocab_size")
    return isinstance(types, int) and types > 1


def _embedding_rows(config: Mapping[str, Any]) -> int | None:
    """Rows of the token embedding by config.json; None if it does not say."""
    for part in (config, config.get("text_config"), config.get("vlm_config")):
        if isinstance(part, Mapping) and isinstance(size := part.get("vocab_size"), int):
            return size
    return None
