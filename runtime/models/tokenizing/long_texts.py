"""Tokenize the beginning of a long text, where the rest provably makes no difference.

A text that is cut to a few hundred tokens need not be tokenized to its end. But ids of a beginning are a beginning of
the ids only where no step of the tokenizer looks across the cut. The cut is made before a single blank (U+0020) that
stands between two characters that are not whitespace; call the text `P + S`, where `S` begins with that blank. Then
ids(P) is a beginning of ids(P + S), step by step:

- Added tokens are matched leftmost and longest. None may have a content that can lie across that blank: it holds no
  whitespace, or (where normalizing keeps the blank's neighbours, see below) only runs of two and more. So every match
  that begins in P ends in P, and the same ones are found in P alone. What they look at beside themselves
  (`single_word`, `lstrip`) is the blank, which like the end of a text is no part of a word; and the whitespace that a
  token of S takes with it is not P's, which ends with something else. None may take the blank behind it (`rstrip`).
- The normalizers allowed turn characters into characters one by one, or are Unicode's normal forms, for which a blank
  is a boundary: it composes with nothing before it, and marks are not reordered across it. So N(P + S) is N(P) + N(S),
  and N(S) begins with a blank.
- The pre-tokenizers allowed either split at whitespace first, whatever stands around it; or split by one of a few
  regular expressions, of which each match that begins before the blank ends before it: a word or a run of other marks
  may begin with a blank but holds none, and whitespace right before the blank there is none, so that no run of it, nor
  what is looked for behind a run, reaches the blank. The latter needs normalizers that neither remove characters nor
  make whitespace of others: NFC and lowercasing.
- Models see one pre-token at a time.

None of it looks at P for what becomes of S, so that a middle which lies between two such places can be left out, too:
its ids are then missing, and the others are there.

What is not known to be like that (Unigram's usual pre-tokenizer and normalizer among it) is tokenized to its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from staged_pool.runtime.models.tokenizing.limits import MOST_CHARACTERS

CUT: Final = re.compile(r"(?<=\S) (?=\S)")
"""Python's whitespace holds all of Unicode's White_Space, which is what tokenizers know as whitespace."""

_CHARACTERS_PER_TOKEN: Final = 8
_MARGIN: Final = 64
"""Characters."""
_GROWTH: Final = 4

_SPLIT_AT_WHITESPACE: Final = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})
_SPLIT_FURTHER: Final = _SPLIT_AT_WHITESPACE | {"ByteLevel", "Digits", "Punctuation"}

_PER_CHARACTER: Final = frozenset({"BertNormalizer", "Lowercase", "StripAccents", "NFC", "NFD", "NFKC", "NFKD"})
_KEEP_NEIGHBOURS: Final = frozenset({"NFC", "Lowercase"})

EXPRESSIONS: Final = frozenset(
    {
        # Llama 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Qwen 2 and 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Qwen 3.5
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
"""Beside ByteLevel's own, which is GPT-2's:
`'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+`."""


def encode_beginnings(
    call: Callable[[list[str]], list[Any]], texts: Sequence[str], wanted: Sequence[int | None]
) -> list[Any]:
    """Encode as much of each text as gives the tokens that are wanted of it.

    Args:
        call: Encodes texts, with a tokenizer for which `can_cut` holds.
        texts: Any.
        wanted: Leading tokens of each text that must be there. None: all.
    """
    sizes = [
        len(text) if tokens is None else _CHARACTERS_PER_TOKEN * tokens + _MARGIN
        for text, tokens in zip(texts, wanted, strict=True)
    ]
    beginnings = [_beginning(text, size) for text, size in zip(texts, sizes, strict=True)]
    encodings = call(beginnings)
    short = list(range(len(texts)))
    while short := [
        place
        for place in short
        if len(beginnings[place]) < len(texts[place]) and len(encodings[place].ids) < (wanted[place] or 0)
    ]:
        for place in short:
            sizes[place] *= _GROWTH
            beginnings[place] = _beginning(texts[place], sizes[place])
        for place, encoding in zip(short, call([beginnings[place] for place in short]), strict=True):
            encodings[place] = encoding
    return encodings


def without_middle(call: Callable[[list[str]], list[Any]], text: str, start: int, end: int, tokens: int) -> str:
    """A text without the most of what stands from `start` to `end`, behind its first tokens.

    Args:
        call: Encodes texts, with a tokenizer for which `can_cut` holds.
        text: Any.
        start: In characters: nothing before it is left out.
        end: In characters: nothing behind it is left out.
        tokens: Leading tokens of the text that must be there.

    Returns:
        A text whose ids begin with as many of those of `text`, and end as they do.
    """
    size = max(start, _CHARACTERS_PER_TOKEN * tokens + _MARGIN)
    while size < end and (found := CUT.search(text, size, end)) is not None:
        beginning = text[: found.start()]
        if len(call([beginning])[0].ids) >= tokens:
            cuts = list(CUT.finditer(text, max(found.start(), end - _MARGIN), end))
            return beginning + text[cuts[-1].start() :] if cuts else text
        size *= _GROWTH
    return text


def can_cut(tokenizer: Tokenizer) -> bool:
    """Whether the ids of a beginning, cut as above, are a beginning of the ids."""
    if any(token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return False
    normalizers = _steps(tokenizer.normalizer, "normalizers")
    pre_tokenizers = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    if normalizers is None or not pre_tokenizers:
        return False
    kinds = {step["type"] for step in normalizers}
    first, *others = pre_tokenizers
    if not all(step["type"] in _SPLIT_FURTHER for step in others):
        return False
    if first["type"] in _SPLIT_AT_WHITESPACE:
        return kinds <= _PER_CHARACTER and not any(map(_has_whitespace, _added(tokenizer)))
    return _has_known_expression(first) and kinds <= _KEEP_NEIGHBOURS and not any(map(_has_blank, _added(tokenizer)))


def _beginning(text: str, size: int) -> str:
    """The text up to the first place behind `size` characters where it may be cut; all of it if there is none.

    It is looked for in as many characters as can be tokenized. A search holds the interpreter's lock.
    """
    if len(text) <= size:
        return text
    found = CUT.search(text, size, max(MOST_CHARACTERS, size) + 1)
    return text if found is None else text[: found.start()]


def _steps(component: Any, parts: str) -> list[dict[str, Any]] | None:
    """The settings of a normalizer or pre-tokenizer, of each step of it. None: it cannot be looked into."""
    if component is None:
        return []
    try:
        settings = json.loads(component.__getstate__())
    except Exception:  # noqa: BLE001 - a component written in Python raises no narrower one
        return None
    return _flat(settings, parts)


def _flat(settings: dict[str, Any], parts: str) -> list[dict[str, Any]]:
    if settings["type"] != "Sequence":
        return [settings]
    return [step for part in settings[parts] for step in _flat(part, parts)]


def _has_known_expression(step: dict[str, Any]) -> bool:
    if step["type"] == "ByteLevel":
        return bool(step.get("use_regex", True))
    return (
        step["type"] == "Split"
        and step["pattern"].get("Regex") in EXPRESSIONS
        and step["behavior"] == "Isolated"
        and not step["invert"]
    )


def _added(tokenizer: Tokenizer) -> list[str]:
    """What added tokens are found by: their content, or what the normalizer makes of it."""
    contents = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    if tokenizer.normalizer is None:
        return contents
    return contents + [tokenizer.normalizer.normalize_str(content) for content in contents]


def _has_whitespace(content: str) -> bool:
    return any(map(str.isspace, content))


def _has_blank(content: str) -> bool:
    """Whether it can lie across a single blank between other characters."""
    return re.search(r"(?<!\s)\s(?!\s)", content) is not None
