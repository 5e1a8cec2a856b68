"""Tokens of texts, for callers who ask for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

TokenIds: TypeAlias = list[int]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one text."""

    ids: TokenIds
    strings: list[str]
    """Each token in the tokenizer's spelling."""
    spans: list[tuple[int, int] | None]
    """Start and end of each token in characters of the text; None for an added special token."""
