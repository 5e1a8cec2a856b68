"""Read `tokenizer.json`, which alone says how a text becomes token ids, and complete it by what stands beside it.

Classes of transformers 5 build a tokenizer of their own from the vocabulary of that file, and drop its other steps.
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
"""A part of the right expression of Mistral's tokenizers, which the wrong one lacks."""

_ACCENTS: Final = str.maketrans("\u00e9\u00ef", "ei")

_RULES: Final[Mapping[str, tuple[Sequence[str], Callable[[str], str]]]] = {
    "do_lower_case": (("Hello World", "THE END", "A Bee"), str.lower),
    "strip_accents": (("caf\u00e9 na\u00efve", "\u00e9t\u00e9"), lambda text: text.translate(_ACCENTS)),
    "tokenize_chinese_chars": (("\u65e5\u672c\u8a9e", "\u4e2d\u6587"), " ".join),
    "add_prefix_space": (("hello", "the"), lambda text: f" {text}"),
}
"""Texts, and what makes of them others that are read alike where the setting is on."""


_TRIED: Final = (("",), ("a b",), ("", ""))
"""A text alone, and a pair: steps that follow each other in a file may fit neither."""


def read_tokenizer_file(body: Path) -> tuple[Tokenizer, Side | None] | None:
    """Read `tokenizer.json` of a folder, and drop what it has kept of the calls before it was saved.

    Returns:
        The tokenizer, and what `without_call_settings` gives for it. None: there is no such file.

    Raises:
        ConfigError: It is damaged, or the library panics where it follows the file.
    """
    path = body / TOKENIZER_FILE
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
        side = without_call_settings(tokenizer)
        for given in _TRIED:
            with suppress(Exception):  # no panic: whoever needs such texts says what is wrong
                tokenizer.encode(*given)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises no narrower one, and no `Exception` where it panics
        JsonFile.read(path, root=body)
        raise ConfigError(f"{body}: the tokenizer cannot be loaded: {TOKENIZER_FILE}: {error}") from error
    return tokenizer, side


def without_call_settings(tokenizer: Tokenizer) -> Side | None:
    """Drop what a saved tokenizer has kept of the calls before: truncation, padding and dropout.

    Returns:
        The side on which it cut texts, which is what is cut where nothing else is said. None: it cut none.
    """
    truncation = tokenizer.truncation
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None  # merges that are left out at random are for training
    if truncation is None:
        return None
    return "left" if str(truncation["direction"]).lower() == "left" else "right"


def add_declared_tokens(tokenizer: Tokenizer, declared: Sequence[DeclaredToken], rows: int | None) -> Iterator[str]:
    """Add tokens that a folder names and `tokenizer.json` lacks, as far as they have an id.

    Args:
        tokenizer: Is changed.
        declared: Those with an id first, in its order.
        rows: Of the model's token embedding, as far as config.json says it.

    Yields:
        Notes for the log.
    """
    for token in declared:
        content, known = token.content, tokenizer.get_added_tokens_decoder()
        found: int | None = tokenizer.token_to_id(content)
        if found is not None and token.index not in (None, found):
            yield (
                f"{SETTINGS}: {content!r} is said to be token {token.index}, which is {found} in {TOKENIZER_FILE}: "
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
        yield f"{SETTINGS}: {content!r} is read as token {tokenizer.token_to_id(content)}, as which it is named there"


def add_ends(tokenizer: Tokenizer, settings: TokenizerSettings, special_tokens: Mapping[str, object]) -> Iterator[str]:
    """Have the tokenizer put the first and the last token around texts that the settings ask for, where it does not.

    Args:
        tokenizer: Is changed.
        settings: Of its folder.
        special_tokens: The text of each special token by its name, as its class has them where the folder does not.

    Yields:
        Notes for the log.

    Raises:
        ConfigError: The token is not known, or the special tokens of the file leave no place for it.
    """
    for asked, field, name, at_end in (
        (settings.begins, "add_bos_token", "bos_token", False),
        (settings.ends, "add_eos_token", "eos_token", True),
    ):
        usual = special_tokens.get(name)
        content = settings.named[name] or (None if usual is None else str(usual))
        if asked is None or (not asked and content is None):
            continue
        found = None if content is None else tokenizer.token_to_id(content)
        if found is None:
            raise ConfigError(f"{SETTINGS}: {field}=true, but {name} names no token of the vocabulary: {content!r}")
        special = find_special_tokens(tokenizer)
        around = special.suffix[-1:] if at_end else special.prefix[:1]
        if (around == [found]) == asked:
            continue
        where = "behind" if at_end else "before"
        if not asked:
            yield f"{SETTINGS}: {field}=false, but {TOKENIZER_FILE} puts {content!r} {where} texts, which is done"
            continue
        assert content is not None
        tokenizer.post_processor = _with_end(tokenizer, content, found, at_end=at_end)
        yield f"{SETTINGS}: {field}=true: {content!r} is put {where} texts, which {TOKENIZER_FILE} does not do"


def contradicted_rules(tokenizer: Tokenizer, rules: Mapping[str, bool]) -> Iterator[str]:
    """Find settings that say something else than `tokenizer.json` does, for the log."""
    for name, wanted in rules.items():
        texts, change = _RULES[name]
        alike = [_bare(tokenizer, text) == _bare(tokenizer, change(text)) for text in texts]
        if all(alike) if not wanted else not any(alike):
            does = "does so" if not wanted else "does not"
            yield f"{SETTINGS}: {name}={str(wanted).lower()}, but {TOKENIZER_FILE} {does}, which is followed"


def check_mistral_fix(tokenizer: Tokenizer) -> None:
    """Reject `fix_mistral_regex` where `tokenizer.json` does not have the right expression already.

    Raises:
        ConfigError: It has another one.
    """
    if _FIXED_MISTRAL not in str(_state(tokenizer.pre_tokenizer)).replace("\\\\", "\\"):
        raise ConfigError(
            f"{SETTINGS}: fix_mistral_regex=true asks for another pre-tokenizer than that of {TOKENIZER_FILE}: save "
            "the tokenizer with the right one, or remove the setting"
        )


def _bare(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _state(component: Any) -> Any:
    """The settings of a part of a tokenizer, as `tokenizer.json` has them."""
    return None if component is None else json.loads(component.__getstate__())


def _with_end(tokenizer: Tokenizer, content: str, token: int, *, at_end: bool) -> Any:
    """The tokenizer's post-processor, with one more special token at the beginning or the end of each text.

    Raises:
        ConfigError: It is of a kind whose special tokens are not a template.
    """
    state = _state(tokenizer.post_processor)
    steps = [] if state is None else state["processors"] if state["type"] == "Sequence" else [state]
    templates = [step for step in steps if step["type"] == "TemplateProcessing"]
    others = [step["type"] for step in steps if step["type"] not in ("TemplateProcessing", "ByteLevel")]
    if others or len(templates) > 1:
        raise ConfigError(
            f"{SETTINGS}: {'add_eos_token' if at_end else 'add_bos_token'}=true, but the special tokens of "
            f"{TOKENIZER_FILE} are set by {others[0] if others else 'two templates'}, which has no place for "
            f"{content!r}: set the tokens there"
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
    """A template with the token before or behind each text: the first one's beginning and the last one's end are those
    of the whole."""
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
