"""Spans of tokens: the characters and the word of each in its text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Span:
    """The characters of a token in its text."""

    start: int
    """Index of its first character; `start == end` for a token without text, such as [CLS]."""
    end: int
    """Index behind its last character."""
    word: int | None
    """Index of its word in the text; None for a token without text."""


NO_TEXT: Final = Span(0, 0, None)
"""Span of a token that stands for no text of the caller, such as [CLS]."""
