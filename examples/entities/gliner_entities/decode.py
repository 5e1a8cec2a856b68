"""Entities from the scores of spans: those above a threshold, the best first, without overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Scores: TypeAlias = NDArray[np.float32]
"""Probabilities of spans, [words, widths, labels]: that of the span of w + 1 words from word i on is [i, w]."""


@dataclass(frozen=True, slots=True)
class Span:
    """A span of words with a label."""

    first: int
    last: int
    """Indices of its first and last words."""
    label: int
    score: float


def find_entities(scores: Scores, threshold: float, *, nested: bool = False, multi_label: bool = False) -> list[Span]:
    """Choose spans greedily: the one with the highest score, then the next that agrees with the chosen ones.

    Args:
        scores: Probabilities of one text.
        threshold: A span needs more than this.
        nested: Allow a span inside another one.
        multi_label: Allow several labels of one span.

    Returns:
        Spans in the order of their first words.
    """
    places = np.argwhere(scores > threshold).tolist()
    spans = [Span(first, first + width, label, float(scores[first, width, label])) for first, width, label in places]
    chosen: list[Span] = []
    for span in sorted(spans, key=lambda each: -each.score):
        if not any(_conflict(span, other, nested=nested, multi_label=multi_label) for other in chosen):
            chosen.append(span)
    return sorted(chosen, key=lambda each: each.first)


def _conflict(one: Span, other: Span, *, nested: bool, multi_label: bool) -> bool:
    if (one.first, one.last) == (other.first, other.last):
        return not multi_label
    if one.first > other.last or other.first > one.last:
        return False
    within = one.first <= other.first and one.last >= other.last
    around = other.first <= one.first and other.last >= one.last
    return not (nested and (within or around))
