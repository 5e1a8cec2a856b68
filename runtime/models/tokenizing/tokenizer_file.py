"""Loading of `tokenizer.json`, completed by the settings in the files beside it.

The file alone defines how a text becomes token ids. Classes of transformers 5, however, rebuild a tokenizer from its
vocabulary and drop its other steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.tokenizing.settings import SETTINGS, DeclaredToken, TokenizerSettings
from staged_pool.runtime.models.tokenizing.special_tokens import find_special_tokens
from staged_pool.runtime.requests import Side
from staged_pool.stages.errors import ConfigError

TOKENIZER_FILE: Final = "tokenizer.json"

_FIXED_MISTRAL: Final = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
"""Part of the correct regular expression of Mistral's tokenizers; the faulty one lacks it."""

_ACCENTS: Final = str.maketrans("\u00e9\u00ef", "ei")

_RULES: Final[Mapping[str, tuple[Sequence[str], Callable[[str], str]]]] = {
    "do_lower_case": (("Hello World", "THE END", "A Bee"), str.lower),
    "strip_accents": (("caf\u00e9 na\u00efve", "\u00e9t\u00e9"), lambda text: text.translate(_ACCENTS)),
    "tokenize_chinese_chars": (("\u65e5\u672c\u8a9e", "\u4e2d\u6587"), " ".join),
    "add_prefix_space": (("hello", "the"), lambda text: f" {text}"),
}
"""By setting: test texts, and a change that leaves their ids the same if the setting is on."""


_TRIED: Final = (("",), ("a b",), ("", ""))
"""Inputs that a loaded tokenizer is tried on: inconsistent steps of a file make the library panic on one."""


def read_tokenizer_file(body: Path) -> tuple[Tokenizer, Side | None] | None:
    """Read `tokenizer.json` of a folder, without its saved truncation, padding and dropout.

    Returns:
        The tokenizer, and the result of `without_call_settings`. None: there is no such file.

    Raises:
        ConfigError: The file is damaged, or the tokenizers library panics on it.
    """
    path = body / TOKENIZER_FILE
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
        side = without_call_settings(tokenizer)
        for given in _TRIED:
            with suppress(Exception):  # only panics matter here; other errors are reported where they occur
                tokenizer.encode(*given)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises a plain Exception, and for a panic a bare BaseException
        JsonFile.read(path, root=body)
        raise ConfigError(f"{body}: the tokenizer cannot be loaded: {TOKENIZER_FILE}: {error}") from error
    return tokenizer, side


def without_call_settings(tokenizer: Tokenizer) -> Side | None:
    """Remove the settings saved from earlier calls: truncation, padding and dropout.

    Returns:
        The saved truncation side, used as the default. None: truncation was off.
    """
    truncation = tokenizer.truncation
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None  # BPE dropout skips merges at random, for training only
    if truncation is None:
        return None
    return "left" if str(truncation["direction"]).lower() == "left" else "right"


def add_declared_tokens(tokenizer: Tokenizer, declared: Sequence[DeclaredToken], rows: int | None) -> Iterator[str]:
    """Add tokens that a folder declares and `tokenizer.json` lacks, if their ids fit.

    Args:
        tokenizer: The tokenizer; it is changed.
        declared: The declared tokens, those with an id first, in the order of their ids.
        rows: Rows of the model's token embedding. None: config.json does not say.

    Yields:
        Notes for the log.
    """
    for token in declared:
        content, known = token.content, tokenizer.get_added_tokens_decoder()
        found: int | None = tokenizer.token_to_id(content)
        if found is not None and token.index not in (None, found):
            yield (
                f"{SETTINGS}: {content!r} is declared as token {token.index}, but is {found} in {TOKENIZER_FILE}: "
                f"{found} is used"
            )
        if any(added.content == content for added in known.values()):
            continue
        if found is None:
            words: int = tokenizer.get_vocab_size(with_added_tokens=False)
            following = max([words, *(number + 1 for number in known)])
            beyond = rows is not None and following >= rows
            if beyond or token.index not in (None, following):
                why = f"the weights have {rows} rows" if beyond else f"its id would be {following}, not {token.index}"
                yield f"{SETTINGS}: {content!r} is not in {TOKENIZER_FILE}, and is read as ordinary text: {why}"
                continue
        added = AddedToken(content, **token.flags)
        (tokenizer.add_special_tokens if added.special else tokenizer.add_tokens)([added])
        yield f"{SETTINGS}: {content!r} is added as token {tokenizer.token_to_id(content)}, as declared there"


def add_ends(tokenizer: Tokenizer, settings: TokenizerSettings, special_tokens: Mapping[str, object]) -> Iterator[str]:
    """Add the first and last token of `add_bos_token` and `add_eos_token`, if the tokenizer does not.

    Args:
        tokenizer: The tokenizer; it is changed.
        settings: The settings of its folder.
        special_tokens: The text of each special token by its name, by the tokenizer's class, as defaults.

    Yields:
        Notes for the log.

    Raises:
        ConfigError: The token is not in the vocabulary, or the file's post-processor has no place for it.
    """
    for asked, field, name, at_end in (
        (settings.adds_bos, "add_bos_token", "bos_token", False),
        (settings.adds_eos, "add_eos_token", "eos_token", True),
    ):
        usual = special_tokens.get(name)
        content = settings.named[name] or (None if usual is None else str(usual))
        if asked is None or (not asked and content is None):
            continue
        found = None if content is None else tokenizer.token_to_id(content)
        if found is None:
            raise ConfigError(f"{SETTINGS}: {field}=true, but {name} is not in the vocabulary: {content!r}")
        special = find_special_tokens(tokenizer)
        around = special.suffix[-1:] if at_end else special.prefix[:1]
        if (around == [found]) == asked:
            continue
        where = "after" if at_end else "before"
        if not asked:
            yield f"{SETTINGS}: {field}=false, but {TOKENIZER_FILE} adds {content!r} {where} texts, which is followed"
            continue
        assert content is not None
        tokenizer.post_processor = _with_end(tokenizer, content, found, at_end=at_end)
        yield f"{SETTINGS}: {field}=true: {content!r} is added {where} texts, which {TOKENIZER_FILE} does not do"


def contradicted_rules(tokenizer: Tokenizer, rules: Mapping[str, bool]) -> Iterator[str]:
    """Yield a note for each setting that contradicts `tokenizer.json`."""
    for name, wanted in rules.items():
        texts, change = _RULES[name]
        alike = [_bare(tokenizer, text) == _bare(tokenizer, change(text)) for text in texts]
        if all(alike) if not wanted else not any(alike):
            does = "does so" if not wanted else "does not"
            yield f"{SETTINGS}: {name}={str(wanted).lower()}, but {TOKENIZER_FILE} {does}, which is followed"


def check_mistral_fix(tokenizer: Tokenizer) -> None:
    """Reject `fix_mistral_regex` unless `tokenizer.json` has the correct expression already.

    Raises:
        ConfigError: The file has another expression.
    """
    if _FIXED_MISTRAL not in str(_state(tokenizer.pre_tokenizer)).replace("\\\\", "\\"):
        raise ConfigError(
            f"{SETTINGS}: fix_mistral_regex=true needs another pre-tokenizer than that of {TOKENIZER_FILE}: save the "
            "tokenizer with the correct one, or remove the setting"
        )


def _bare(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _state(component: Any) -> Any:
    """Settings of a tokenizer's component, as in `tokenizer.json`."""
    return None if component is None else json.loads(component.__getstate__())


def _with_end(tokenizer: Tokenizer, content: str, token: int, *, at_end: bool) -> Any:
    """Build the tokenizer's post-processor with one more special token before or after each text.

    Raises:
        ConfigError: The post-processor is not a template.
    """
    state = _state(tokenizer.post_processor)
    steps = [] if state is None else state["processors"] if state["type"] == "Sequence" else [state]
    templates = [step for step in steps if step["type"] == "TemplateProcessing"]
    others = [step["type"] for step in steps if step["type"] not in ("TemplateProcessing", "ByteLevel")]
    if others or len(templates) > 1:
        raise ConfigError(
            f"{SETTINGS}: {'add_eos_token' if at_end else 'add_bos_token'}=true, but the special tokens of "
            f"{TOKENIZER_FILE} come from {others[0] if others else 'two templates'}, to which {content!r} cannot be "
            "added: set the tokens in that file"
        )
    if not templates:
        texts: list[Any] = [{"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB")]
        templates = [{"type": "TemplateProcessing", "single": texts[:1], "pair": texts, "special_tokens": {}}]
        steps = [*steps, *templates]
    (template,) = templates
    for form in ("single", "pair"):
        template[form] = list(_with_pieces(template[form], content, at_end=at_end))
    template["special_tokens"][content] = {"id": content, "ids": [token], "tokens": [content]}
    shell = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""},
        "post_processor": {"type": "Sequence", "processors": steps} if len(steps) > 1 else steps[0],
    }
    return Tokenizer.from_str(json.dumps(shell)).post_processor


def _with_pieces(pieces: Sequence[dict[str, Any]], content: str, *, at_end: bool) -> Iterator[dict[str, Any]]:
    """Yield a template's pieces with the token added before or after each text.

    Before the first text it goes to the beginning of the whole template, and after the last text to its end.
    """
    places = [place for place, piece in enumerate(pieces) if "Sequence" in piece]
    kinds = {place: pieces[place]["Sequence"]["type_id"] for place in places}
    if at_end:
        at = {place + 1: kinds[place] for place in places[:-1]} | {len(pieces): kinds[places[-1]]}
    else:
        at = {place: kinds[place] for place in places[1:]} | {0: kinds[places[0]]}
    for place in range(len(pieces) + 1):
        if place in at:
            yield {"SpecialToken": {"id": content, "type_id": at[place]}}
        yield from pieces[place : place + 1]
