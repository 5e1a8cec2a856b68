"""Tokenization of a long text's beginning, cut where the rest cannot change its ids.

A text that is cut to a few hundred tokens need not be tokenized to its end. But the ids of a prefix are a prefix of the
ids only if no step of the tokenizer looks across the cut. The cut is before a single space (U+0020) between two
characters that are not whitespace. Let the text be `P + S`, where `S` begins with that space. Then ids(P) is a prefix
of ids(P + S), by these conditions on each step:

- Added tokens are matched leftmost and longest. No token's content may lie across that space: it has no whitespace, or
  only runs of two and more (if normalizing keeps the neighbours of the space, see below). So each match that begins in
  P ends in P, and P alone has the same matches. `single_word` and `lstrip` look only at the space, which is no part of
  a word, like the end of a text. The whitespace that a token of S strips is not P's, since P ends with another
  character. No token may have `rstrip`, which would take the space after it.
- The allowed normalizers map characters one by one, or are Unicode normal forms. For these a space is a boundary: it
  composes with nothing before it, and no mark is reordered across it. So N(P + S) is N(P) + N(S), and N(S) begins with
  a space.
- The allowed pre-tokenizers either split at whitespace first, or by one of a few regular expressions. Each match of
  these that begins before the space ends before it: words and runs of other marks may begin with a space but have none
  inside. There is no whitespace right before the space, so no run of whitespace, nor a lookahead after one, reaches it.
  The expressions need normalizers that neither remove characters nor turn others into whitespace: NFC and lowercasing.
- The model sees one pre-token at a time.

No step looks at P to tokenize S. So the text between two such places can be left out too: then only its own ids are
missing.

A tokenizer without these properties, such as Unigram with its usual pre-tokenizer and normalizer, tokenizes the whole
text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from staged_pool.runtime.models.tokenizing.limits import MAX_CHARACTERS

CUT_PLACE: Final = re.compile(r"(?<=\S) (?=\S)")
"""Places to cut: a single space between other characters.

Python's `\\s` includes all of Unicode's White_Space, the whitespace of tokenizers.
"""

_CHARACTERS_PER_TOKEN: Final = 8
_MARGIN: Final = 64
"""Characters added to the estimated size of a beginning."""
_GROWTH: Final = 4
"""Factor by which a beginning grows if it has too few tokens."""

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
"""Allowed regular expressions of pre-tokenizers.

ByteLevel's own is allowed too; it is GPT-2's:
`'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+`.
"""


def encode_beginnings(
    call: Callable[[list[str]], list[Any]], texts: Sequence[str], wanted: Sequence[int | None]
) -> list[Any]:
    """Encode as much of each text as its wanted tokens need.

    Args:
        call: Encodes texts, with a tokenizer for which `can_cut` is true.
        texts: The texts.
        wanted: Number of leading tokens needed of each text. None: all.
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
    """Remove most of a text between `start` and `end`, but not its first tokens.

    Args:
        call: Encodes texts, with a tokenizer for which `can_cut` is true.
        text: The text.
        start: Index of the first character that may be removed.
        end: Index after the last character that may be removed.
        tokens: Number of leading tokens to keep.

    Returns:
        A text whose ids have the same first `tokens` ids and the same end as those of `text`.
    """
    size = max(start, _CHARACTERS_PER_TOKEN * tokens + _MARGIN)
    while size < end and (found := CUT_PLACE.search(text, size, end)) is not None:
        beginning = text[: found.start()]
        if len(call([beginning])[0].ids) >= tokens:
            cuts = list(CUT_PLACE.finditer(text, max(found.start(), end - _MARGIN), end))
            return beginning + text[cuts[-1].start() :] if cuts else text
        size *= _GROWTH
    return text


def can_cut(tokenizer: Tokenizer) -> bool:
    """True if the tokenizer meets the conditions above: ids of a prefix are a prefix of the ids."""
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
    """The text up to its first place to cut after `size` characters; the whole text if there is none.

    The search ends at `MAX_CHARACTERS`, because it holds the interpreter's lock.
    """
    if len(text) <= size:
        return text
    found = CUT_PLACE.search(text, size, max(MAX_CHARACTERS, size) + 1)
    return text if found is None else text[: found.start()]


def _steps(component: Any, parts: str) -> list[dict[str, Any]] | None:
    """Settings of each step of a normalizer or pre-tokenizer. None: it has no readable settings."""
    if component is None:
        return []
    try:
        settings = json.loads(component.__getstate__())
    except Exception:  # noqa: BLE001 - a component written in Python raises a plain Exception
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
    """Texts that match added tokens: their contents, and their normalized contents."""
    contents = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    if tokenizer.normalizer is None:
        return contents
    return contents + [tokenizer.normalizer.normalize_str(content) for content in contents]


def _has_whitespace(content: str) -> bool:
    return any(map(str.isspace, content))


def _has_blank(content: str) -> bool:
    """True if the content has a single whitespace character between others."""
    return re.search(r"(?<!\s)\s(?!\s)", content) is not None
