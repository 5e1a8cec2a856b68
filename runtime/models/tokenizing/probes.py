"""Comparison of two tokenizers on short texts of kinds on which tokenizers often differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from tokenizers import Tokenizer

Encode: TypeAlias = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""Token ids of texts, without special tokens around them."""

PROBE_TEXTS: Final[Mapping[str, Sequence[str]]] = {
    "words": ("a short text of plain words", "don't stop, we'll see: (really) well-known e-mail!"),
    "capitals": ("Hello World", "THE QUICK BROWN FOX", "iPhone McDonald"),
    "numbers": ("12345", "in 2023 and 1999", "3.14159, 650841823 and 10,000", "x86 b2b 007"),
    "accents": ("caf\u00e9 na\u00efve r\u00e9sum\u00e9", "e\u0301te\u0301 u\u0308ber", "Stra\u00dfe \u0130stanbul"),
    "compatibility forms": ("\ufb01ne \uff26\uff55\uff4c\uff4c \u2460", "x\u00b2 \u00bd \u2122 \u2026", "\u3000\u00a0"),
    "blanks": ("  two  blanks", "trailing ", "tab\there", "a   b     c"),
    "line ends": ("one\ntwo\n\nthree", "one\r\ntwo\r\n", "\n x\n"),
    "CJK": ("\u65e5\u672c\u8a9e\u30c6\u30b9\u30c8", "\u4e2d\u6587 \u6587", "\ud55c\uad6d"),
    "emoji": ("\U0001f642 ok \U0001f642\U0001f3fd", "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f"),
    "control characters": ("a\u200bb\u00adc", "x\x00y\x07z", "\ufeffstart"),
}
"""Texts by kind."""


def encoder(tokenizer: Tokenizer) -> Encode:
    """Return a function that encodes with this tokenizer, which must neither truncate nor pad."""
    return lambda texts: [e.ids for e in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def differences(first: Encode, second: Encode, *, more: Mapping[str, Sequence[str]] | None = None) -> tuple[str, ...]:
    """Find the kinds of texts for which two tokenizers give different ids.

    Args:
        first: One tokenizer.
        second: The other tokenizer.
        more: Texts besides `PROBE_TEXTS`, by kind.
    """
    return tuple(kind for kind, texts in {**PROBE_TEXTS, **(more or {})}.items() if [*first(texts)] != [*second(texts)])
