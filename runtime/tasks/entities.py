"""Entities from token labels, as in the token classification pipeline of transformers.

Labels may have the prefixes B- (an entity begins) and I- (it continues). A label without a prefix continues, too. O is
no entity. Where a label also has a B-, these prefixes are read as well, which transformers takes for labels of their
own: E- and L- (an entity ends), S- and U- (one that begins and ends), M- (it continues).

Words are those of the tokenizer. transformers guesses them from the spelling of tokens, and for tokenizers other than
WordPiece takes punctuation for a part of the word before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.requests import Aggregation
from staged_pool.runtime.results import Entity
from staged_pool.runtime.spans import Span

_NOTHING: Final = "O"
"""Label of tokens outside of entities."""

_MORE_PREFIXES: Final = ("E-", "L-", "M-", "S-", "U-")
"""Prefixes of the schemes BIOES, BILOU and BMES beside B- and I-."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A token or a word with its label."""

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
    """Return the entities of one input, in the order of the text.

    Args:
        source: Input of the caller; only a text has entities.
        spans: Span of each token in the text. None: unknown, as for token ids.
        probabilities: [tokens, labels].
        labels: Names of the labels.
        aggregation: See `TokenClassifyRequest`.
    """
    if not isinstance(source, str) or spans is None:
        return ()
    tokens = [(span, row) for span, row in zip(spans, probabilities, strict=True) if span.word is not None]
    if aggregation in _AGREE:
        # Tokens of a word first agree on a row; then each word counts as a token.
        agree = _AGREE[aggregation]
        words = (list(word) for _, word in groupby(tokens, key=lambda token: token[0].word))
        pieces = [
            _piece(agree(np.stack([row for _, row in word])), word[0][0].start, word[-1][0].end, labels)
            for word in words
        ]
    else:
        pieces = [_piece(row, span.start, span.end, labels) for span, row in tokens]
    found = ((piece.label, [piece]) for piece in pieces) if aggregation == "none" else _joined(pieces, _places(labels))
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


def steps(
    source: object, tags: NDArray[np.int32] | None, probabilities: NDArray[np.float32], labels: Sequence[str]
) -> tuple[Entity, ...]:
    """Return the steps of one input as entities.

    Each has the probability of the last label, which means that it is right.

    Args:
        source: Input of the caller; only a text has entities.
        tags: [steps, 2]: the first character of the tag behind each step, and the one behind its last. None: unknown.
        probabilities: [steps, labels].
        labels: Names of the labels.
    """
    if not isinstance(source, str) or tags is None:
        return ()
    starts = [0, *tags[:-1, 1].tolist()]
    return tuple(
        Entity(label=labels[-1], score=float(row[-1]), start=start, end=end, text=source[start:end])
        for start, end, row in zip(starts, tags[:, 0].tolist(), probabilities, strict=True)
    )


def _piece(row: NDArray[np.float32], start: int, end: int, labels: Sequence[str]) -> _Piece:
    best = int(row.argmax())
    return _Piece(labels[best], float(row[best]), start, end)


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a token in its entity, by its label."""

    label: str
    """The label without its prefix."""
    begins: bool = False
    ends: bool = False


def _places(labels: Sequence[str]) -> Mapping[str, _Place]:
    """Read the prefixes of labels."""
    begun = {label[2:] for label in labels if label.startswith("B-")}
    return {label: _place(label, begun) for label in labels}


def _place(label: str, begun: Set[str]) -> _Place:
    """Read the prefix of a label; `begun` are those that have a B-."""
    prefix, name = label[:2], label[2:]
    if prefix in ("B-", "I-"):
        return _Place(name, begins=prefix == "B-")
    if prefix in _MORE_PREFIXES and name in begun:
        return _Place(name, begins=prefix in ("S-", "U-"), ends=prefix != "M-")
    return _Place(label)


def _joined(pieces: Sequence[_Piece], places: Mapping[str, _Place]) -> Iterator[tuple[str, list[_Piece]]]:
    """Yield the adjacent pieces of each entity with its label. B- begins a new entity of any label."""
    group: list[_Piece] = []
    last: _Place | None = None
    for piece in pieces:
        place = places[piece.label]
        if last is not None and (place.begins or last.ends or place.label != last.label):
            yield _group_label(group), group
            group = []
        group.append(piece)
        last = place
    if group:
        yield _group_label(group), group


def _group_label(group: Sequence[_Piece]) -> str:
    """Return the label without its prefix, such as B-, I-, E- or S-."""
    return group[0].label.split("-", 1)[-1]


def _surest(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    # By the least sum of the other probabilities: the highest one rounds to 1 in float32 for all sure tokens.
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
"""Functions that give a word one row: [tokens, labels] -> [labels]."""
