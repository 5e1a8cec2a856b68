"""Clean up decoded text, as `clean_up_tokenization_spaces` asks for it."""

from __future__ import annotations

from typing import Final

_GAPS: Final = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {ending}", ending) for ending in ("n't", "'m", "'s", "'ve", "'re")),
)
"""What is replaced, in this order: the rules of transformers' `clean_up_tokenization`."""


def without_gaps(text: str) -> str:
    """Remove the blanks before English punctuation and contractions."""
    for gap, closed in _GAPS:
        text = text.replace(gap, closed)
    return text
