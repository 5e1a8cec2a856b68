"""Clean-up of decoded text for the setting `clean_up_tokenization_spaces`."""

from __future__ import annotations

from typing import Final

_GAPS: Final = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {ending}", ending) for ending in ("n't", "'m", "'s", "'ve", "'re")),
)
"""Replacements, in order: the rules of transformers' `clean_up_tokenization`."""


def clean_up_spaces(text: str) -> str:
    """Remove spaces before English punctuation and contractions."""
    for gap, closed in _GAPS:
        text = text.replace(gap, closed)
    return text
