"""Make entities of the labels of tokens, as the token classification pipeline of transformers does.

Labels may carry the prefixes B- (an entity begins) and I- (it goes on); a label without one goes on too. O is no
entity.
The difference to transformers is what a word is: here what the tokenizer took for one, there a guess from the tokens'
spelling, which for tokenizers other than WordPiece takes punctuation for a part of the word before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.model import Span
from staged_pool.runtime.requests import Aggregation
from staged_pool.runtime.results import Entity

_NOTHING: Final = "O"
"""The label of tokens that belong to no entity."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A token or a word, and the label that it has."""

    label: str
    score: float
    start: int
    end: int


def entities(
    source: object,
    spans: Sequence[Span] | None,
    probabilities: NDArray[np.float32],
    labels: Sequence[str],
    aggregation: Aggregation,
) -> tuple[Entity, ...]:
    """The entities of one input, in the order of the text.

    Args:
        source: What the caller sent; only a text has entities.
        spans: Where each token stands in it. None: not known, as for token ids.
        probabilities: [tokens, labels].
        labels: Their names.
        aggregation: See `TokenClassifyRequest`.
    """
    if not isinstance(source, str) or spans is None:
        return ()
    tokens = [(span, row) for span, row in zip(spans, probabilities, strict=True) if span.word is not None]
    if aggregation in _AGREE:
        # Tokens of one word agree on a row first; each word is then as one token.
        agree = _AGREE[aggregation]
        words = (list(word) for _, word in groupby(tokens, key=lambda token: token[0].word))
        pieces = [
            _piece(agree(np.stack([row for _, row in word])), word[0][0].start, word[-1][0].end, labels)
            for word in words
        ]
    else:
        pieces = [_piece(row, span.start, span.end, labels) for span, row in tokens]
    found = ((piece.label, [piece]) for piece in pieces) if aggregation == "none" else _joined(pieces)
    return tuple(
        Entity(
            label=label,
            score=float(np.mean([piece.score for piece in group])),
            start=group[0].start,
            end=group[-1].end,
            text=source[group[0].start : group[-1].end],
        )
        for label, group in found
        if label != _NOTHING
    )


def _piece(row: NDArray[np.float32], start: int, end: int, labels: Sequence[str]) -> _Piece:
    best = int(row.argmax())
    return _Piece(labels[best], float(row[best]), start, end)


def _joined(pieces: Sequence[_Piece]) -> Iterator[tuple[str, list[_Piece]]]:
    """Neighbours of one entity, and its label without a prefix. B- begins a new one, even of the same label."""
    group: list[_Piece] = []
    last = ""
    for piece in pieces:
        begins, label = _without_prefix(piece.label)
        if group and (begins or label != last):
            yield _group_label(group), group
            group = []
        group.append(piece)
        last = label
    if group:
        yield _group_label(group), group


def _without_prefix(label: str) -> tuple[bool, str]:
    """Whether an entity begins here, and which label it has."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label


def _group_label(group: Sequence[_Piece]) -> str:
    """What stands behind the first hyphen, whatever stands before it (such as B, I, E or S)."""
    return group[0].label.split("-", 1)[-1]


def _surest(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    # Not by the highest probability, which is 1 in float32 for all that are sure: by how little the others have.
    doubts = [float(np.delete(row, row.argmax()).sum(dtype=np.float64)) for row in rows]
    surest: NDArray[np.float32] = rows[int(np.argmin(doubts))]
    return surest


def _first(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    first: NDArray[np.float32] = rows[0]
    return first


def _average(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    average: NDArray[np.float32] = rows.mean(axis=0)
    return average


_AGREE: Final[Mapping[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]]] = {
    "first": _first,
    "average": _average,
    "max": _surest,
}
"""What a word's tokens agree on: [tokens, labels] -> [labels]."""
