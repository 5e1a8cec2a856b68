"""JSON of large answers, in pieces: no thread holds the interpreter's lock for so long that the event loop is late."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, TypeAlias

import orjson
from numpy.typing import NDArray

Pieces: TypeAlias = bytes | tuple[bytes, ...]
"""The body of an answer; a large one in the pieces in which it was made, which are sent one by one."""

PIECE_VALUES: Final = 16_384
"""Numbers that are written at a time. The lock is held meanwhile: about a millisecond for floats."""

_SMALL_BYTES: Final = 2**16
_OPTIONS: Final = orjson.OPT_SERIALIZE_NUMPY


def dump(answer: object) -> bytes:
    """JSON of an answer; arrays become lists of numbers, each the shortest that reads back as the same float32."""
    return orjson.dumps(answer, option=_OPTIONS)


def dump_array(array: NDArray[Any]) -> orjson.Fragment:
    """JSON of an array that has too many numbers for one piece; of several rows, or it is written as it is."""
    if array.ndim < 2:
        return orjson.Fragment(dump(array))
    rows = max(1, PIECE_VALUES // array.shape[-1])
    parts = (dump(array[start : start + rows])[1:-1] for start in range(0, len(array), rows))
    return orjson.Fragment(b"[" + b",".join(with_pauses(parts)) + b"]")


def average(total: int, count: int) -> int:
    """Of `count` items that have so many numbers together, rounded up."""
    return -(-total // max(1, count))


def dump_list(items: Iterable[object], *, item_values: int) -> Pieces:
    """JSON of a list.

    Args:
        items: Made as they are written.
        item_values: How many numbers each has, on average.
    """
    return _joined(b"[", items, b"]", item_values)


def dump_around(
    before: Mapping[str, object], name: str, items: Iterable[object], after: Mapping[str, object], *, item_values: int
) -> Pieces:
    """JSON of an object of which one entry, a list, may be large.

    Args:
        before: The entries in front of it; at least one.
        name: Of the list.
        items: See `dump_list`.
        after: The entries behind it; at least one.
        item_values: See `dump_list`.
    """
    opening = dump(before)[:-1] + b"," + dump(name) + b":["
    return _joined(opening, items, b"]," + dump(after)[1:], item_values)


def joined(parts: Iterable[Pieces]) -> Pieces:
    """Contents one after the other; what is small becomes one piece with its neighbours."""
    pieces: list[bytes] = []
    for part in parts:
        for piece in (part,) if isinstance(part, bytes) else part:
            if pieces and len(pieces[-1]) + len(piece) <= _SMALL_BYTES:
                pieces[-1] += piece
            else:
                pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else tuple(pieces)


def _joined(opening: bytes, items: Iterable[object], ending: bytes, item_values: int) -> Pieces:
    groups = _groups(iter(items), max(1, PIECE_VALUES // max(1, item_values)))
    pieces = list(with_pauses(dump(group)[1:-1] for group in groups))
    if len(pieces) < 2:
        return opening + b"".join(pieces) + ending
    return (opening + pieces[0], *(b"," + piece for piece in pieces[1:]), ending)


def _groups(items: Iterator[object], size: int) -> Iterator[list[object]]:
    while group := list(islice(items, size)):
        yield group


def with_pauses(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Each piece; between two, whoever waits for the interpreter's lock may take it."""
    for index, piece in enumerate(pieces):
        if index:
            time.sleep(_PAUSE_S)
        yield piece


_PAUSE_S: Final = 1e-6
"""Sleeping gives the lock up."""
