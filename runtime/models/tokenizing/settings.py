"""Tokenizer settings and special tokens in the files beside `tokenizer.json`.

Each setting is used, checked against `tokenizer.json`, ignored because it has no effect here, or rejected by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.requests import Side
from staged_pool.stages.errors import ConfigError

SETTINGS: Final = "tokenizer_config.json"

_TEXT_RULES: Final = ("do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space")
"""Settings that describe steps of `tokenizer.json`."""

_USED: Final = frozenset(
    {"add_bos_token", "add_eos_token", "added_tokens_decoder", "additional_special_tokens", "auto_map",
     "chat_template", "clean_up_tokenization_spaces", "extra_special_tokens", "fast_tokenizer_files",
     "fix_mistral_regex", "model_input_names", "model_max_length", "model_specific_special_tokens", "padding_side",
     "split_special_tokens", "tokenizer_class", "truncation_side", *_TEXT_RULES,
     "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"}
)  # fmt: skip

_IN_THE_FILE: Final[Mapping[str, tuple[object, ...]]] = {
    "do_basic_tokenize": (True,),
    "do_split": (True,),
    "dropout": (None, 0, 0.0),
    "errors": ("replace",),
    "from_slow": (False,),
    "keep_accents": (None, False, True),
    "legacy": (None, False, True),
    "never_split": (None, []),
    "remove_space": (True,),
    "sp_model_kwargs": (None, {}),
    "split_by_punct": (False,),
    "trim_offsets": (None, False, True),
    "use_default_system_prompt": (None, False),
}
"""Settings that `tokenizer.json` replaces, and their values that need no note in the log."""

_IGNORED: Final = frozenset(
    {"_commit_hash", "add_special_tokens", "backend", "device_map", "is_local", "language", "local_files_only",
     "mask_padding", "max_len", "max_length", "model_type", "name_or_path", "pad_to_multiple_of",
     "pad_token_type_id", "padding", "processor_class", "return_tensors", "response_template",
     "spaces_between_special_tokens", "special_tokens_map_file", "stride", "task", "tokenizer_file", "tokenizer_type",
     "torch_dtype", "transformers_version", "truncation", "truncation_strategy", "trust_remote_code", "unk_id",
     "use_fast", "verbose", "version", "vocab_file", "vocab_size", "vocab_type", "merges_file", "fast",
     "return_token_type_ids", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id",
     "cls_token_id", "mask_token_id"}
)  # fmt: skip
"""Settings without effect here: arguments of calls, and facts about the folder's origin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredToken:
    """A token that a folder declares in a file beside `tokenizer.json`."""

    content: str
    index: int | None = None
    """Its declared id. None: not declared."""
    flags: Mapping[str, bool]
    """Arguments of `tokenizers.AddedToken`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """Tokenizer settings from the files beside `tokenizer.json`."""

    adds_bos: bool | None
    """`add_bos_token`."""
    adds_eos: bool | None
    """`add_eos_token`."""
    named: Mapping[str, str | None]
    """The texts of `bos_token` and `eos_token`."""
    truncation_side: Side | None
    splits_special_tokens: bool
    """Tokenize the text of a special token in an input as ordinary text."""
    cleans_up: bool
    """Remove spaces before punctuation from decoded text."""
    cleans_up_bpe: bool
    """Do so for BPE tokenizers too, although their decoded spaces are right."""
    rules: Mapping[str, bool]
    """The text rules (`do_lower_case` and others) that are set."""
    wants_mistral_fix: bool
    class_name: str | None
    """`tokenizer_class`."""
    names_inputs: bool
    """True if `model_input_names` is set."""
    declared: tuple[DeclaredToken, ...]
    notes: tuple[str, ...]
    """Settings without the effect that they suggest, for the log."""

    rewritten: Mapping[str, Any]
    """Fields with tokens as objects, which transformers 5 does not read, converted to texts."""

    def is_named(self, content: str) -> bool:
        """Return True if the folder declares this token."""
        return any(token.content == content for token in self.declared)


def read_settings(body: Path) -> TokenizerSettings:
    """Read the settings of the tokenizer in a folder.

    Raises:
        ConfigError: A file is malformed, or a setting is not supported; the message names both.
    """
    file = JsonFile.read(body / SETTINGS, root=body) or JsonFile.empty()
    named = JsonFile.read(body / "special_tokens_map.json", root=body) or JsonFile.empty()
    added = JsonFile.read(body / "added_tokens.json", root=body) or JsonFile.empty()
    if versions := [name for name in file.get("fast_tokenizer_files", list, []) if name != "tokenizer.json"]:
        raise ConfigError(f"{SETTINGS}: fast_tokenizer_files={versions!r} is not supported: keep one tokenizer.json")
    side = file.get("truncation_side", str, None)
    for name in ("truncation_side", "padding_side"):
        if (given := file.get(name, str, None)) not in (None, "left", "right"):
            raise ConfigError(f"{SETTINGS}: {name}={given!r} must be 'left' or 'right'")
    if isinstance(longest := file.content.get("model_max_length"), str | bool | list | dict):
        raise ConfigError(f"{SETTINGS}: model_max_length={longest!r} must be a number")
    declared = {token.content: token for each in (added, named, file) for token in _declared(each)}
    return TokenizerSettings(
        adds_bos=file.get("add_bos_token", bool, None),
        adds_eos=file.get("add_eos_token", bool, None),
        named={name: _content(file, named, name) for name in ("bos_token", "eos_token")},
        truncation_side=cast("Side | None", side),
        splits_special_tokens=file.get("split_special_tokens", bool, False),
        cleans_up=file.get("clean_up_tokenization_spaces", bool, False),
        cleans_up_bpe=file.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", bool, False),
        rules={name: value for name in _TEXT_RULES if (value := file.get(name, bool, None)) is not None},
        wants_mistral_fix=file.get("fix_mistral_regex", bool, False),
        class_name=file.get("tokenizer_class", str, None),
        names_inputs=bool(file.get("model_input_names", list, [])),
        declared=tuple(sorted(declared.values(), key=lambda t: (t.index is None, t.index or 0))),
        notes=tuple(_notes(file)),
        rewritten=_as_texts(file, named),
    )


def _notes(file: JsonFile) -> Iterator[str]:
    for name, value in file.content.items():
        if name in _IN_THE_FILE:
            if value not in _IN_THE_FILE[name]:
                yield f"{SETTINGS}: {name}={value!r} is ignored: tokenizer.json is followed"
        elif name not in _USED | _IGNORED and not name.endswith(("_token", "_tokens")):
            yield f"{SETTINGS}: {name} is not known, and is ignored"


def _declared(file: JsonFile) -> Iterator[DeclaredToken]:
    """Yield the tokens that one file declares; those with ids and flags come last and win."""
    if file.name == "added_tokens.json":
        for content, index in file.content.items():
            if isinstance(index, int):
                yield DeclaredToken(content=content, index=index, flags={})
        return
    for name, value in file.content.items():
        if name in ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"):
            values = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        else:
            values = [value] if name.endswith("_token") else []
        for each in values:
            if (token := _token(each, special=True)) is not None:
                yield token
    for index, each in file.get("added_tokens_decoder", dict, {}).items():
        token = _token(each, special=False)
        if token is None or not str(index).isdecimal():
            raise ConfigError(f"{file.name}: added_tokens_decoder: {index!r}: {each!r} is not a token with its id")
        yield DeclaredToken(content=token.content, index=int(index), flags=token.flags)


def _as_texts(file: JsonFile, named: JsonFile) -> dict[str, Any]:
    """Convert fields that have special tokens as objects without a `__type` to fields with texts."""
    found: dict[str, Any] = {}
    for name, value in file.content.items():
        bare = name.endswith("_token") and isinstance(value, dict) and "__type" not in value
        if bare and (token := _token(value, special=True)) is not None:
            found[name] = token.content
    for field in ("additional_special_tokens", "extra_special_tokens"):
        given = [value for each in (file, named) if (value := each.content.get(field))]
        plain = [list(value.values()) if isinstance(value, dict) else value for value in given]
        values = [value for each in plain if isinstance(each, list) for value in each]
        if not any(isinstance(value, dict) for value in values):
            continue
        if isinstance(first := given[0], dict):
            named_tokens = {name: _token(value, special=True) for name, value in first.items()}
            found[field] = {name: token.content for name, token in named_tokens.items() if token is not None}
            continue
        tokens = [_token(value, special=True) for value in values]
        found[field] = list(dict.fromkeys(token.content for token in tokens if token is not None))
    return found


def _token(value: Any, *, special: bool) -> DeclaredToken | None:
    """Read a token: its text, or an object with its text and flags."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or not content:
        return None
    flags: dict[str, bool] = {"special": special} | ({"normalized": False} if special else {})
    if isinstance(value, dict):
        names = ("lstrip", "rstrip", "single_word", "normalized", "special")
        flags |= {name: value[name] for name in names if isinstance(value.get(name), bool)}
    return DeclaredToken(content=content, flags=flags | ({"special": True} if special else {}))


def _content(file: JsonFile, named: JsonFile, field: str) -> str | None:
    tokens = (_token(each.content.get(field), special=True) for each in (file, named))
    return next((token.content for token in tokens if token is not None), None)
