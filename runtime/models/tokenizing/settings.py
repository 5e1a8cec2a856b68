"""Read what stands beside `tokenizer.json`: the settings and the special tokens that a folder names.

Each setting is used, checked against `tokenizer.json`, without effect here, or rejected by name.
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
"""Settings that say in other words what steps of `tokenizer.json` do."""

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
"""Settings of classes of which `tokenizer.json` is the result, and their values that need no word."""

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
"""Settings of calls that are not made here, and remarks on where a folder comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredToken:
    """A token that a folder names beside `tokenizer.json`."""

    content: str
    index: int | None = None
    """The id that it is said to have. None: not said."""
    flags: Mapping[str, bool]
    """Arguments of `tokenizers.AddedToken`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """What a folder says of its tokenizer beside `tokenizer.json`."""

    begins: bool | None
    """`add_bos_token`."""
    ends: bool | None
    """`add_eos_token`."""
    named: Mapping[str, str | None]
    """The texts of `bos_token` and `eos_token`."""
    truncation_side: Side | None
    splits_special_tokens: bool
    """Whether the text of a special token in an input is read as ordinary text."""
    cleans_up: bool
    """Whether blanks before punctuation are removed from decoded text."""
    cleans_up_bpe: bool
    """Whether that holds for BPE, too, whose own blanks are right as they are."""
    rules: Mapping[str, bool]
    """Those settings of `do_lower_case` and its like that are set."""
    wants_mistral_fix: bool
    class_name: str | None
    """`tokenizer_class`."""
    names_inputs: bool
    """Whether `model_input_names` is set."""
    declared: tuple[DeclaredToken, ...]
    notes: tuple[str, ...]
    """Settings that have no effect although they look like it, for the log."""

    rewritten: Mapping[str, Any]
    """Fields whose tokens are written as objects, which transformers 5 does not read, with their texts instead."""

    def is_named(self, content: str) -> bool:
        """Whether the folder itself names this token."""
        return any(token.content == content for token in self.declared)


def read_settings(body: Path) -> TokenizerSettings:
    """Read the settings of the tokenizer in a folder.

    Raises:
        ConfigError: A file is malformed, or a setting is not supported; names both.
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
        begins=file.get("add_bos_token", bool, None),
        ends=file.get("add_eos_token", bool, None),
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
                yield f"{SETTINGS}: {name}={value!r}: what is done is what tokenizer.json says"
        elif name not in _USED | _IGNORED and not name.endswith(("_token", "_tokens")):
            yield f"{SETTINGS}: {name} is not known here, and has no effect"


def _declared(file: JsonFile) -> Iterator[DeclaredToken]:
    """The tokens that one file names; those with more said of them last."""
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
        for one in values:
            if (token := _token(one, special=True)) is not None:
                yield token
    for index, one in file.get("added_tokens_decoder", dict, {}).items():
        token = _token(one, special=False)
        if token is None or not str(index).isdecimal():
            raise ConfigError(f"{file.name}: added_tokens_decoder: {index!r}: {one!r} is not a token and its id")
        yield DeclaredToken(content=token.content, index=int(index), flags=token.flags)


def _as_texts(file: JsonFile, named: JsonFile) -> dict[str, Any]:
    """Fields of special tokens that are written as objects without a `__type`: all tokens of the field as texts."""
    found: dict[str, Any] = {}
    for name, value in file.content.items():
        bare = name.endswith("_token") and isinstance(value, dict) and "__type" not in value
        if bare and (one := _token(value, special=True)) is not None:
            found[name] = one.content
    for field in ("additional_special_tokens", "extra_special_tokens"):
        given = [value for each in (file, named) if (value := each.content.get(field))]
        plain = [list(value.values()) if isinstance(value, dict) else value for value in given]
        if not any(isinstance(one, dict) for each in plain if isinstance(each, list) for one in each):
            continue
        if isinstance(first := given[0], dict):
            found[field] = {name: token.content for name, one in first.items() if (token := _token(one, special=True))}
            continue
        tokens = [_token(one, special=True) for each in plain if isinstance(each, list) for one in each]
        found[field] = list(dict.fromkeys(token.content for token in tokens if token is not None))
    return found


def _token(value: Any, *, special: bool) -> DeclaredToken | None:
    """A token as these files write it: its text, or an object with it and its flags."""
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
