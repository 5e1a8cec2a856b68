"""JSON of large answers, in pieces: no thread holds the interpreter's lock for so long that the event loop is late."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Final, TypeAlias, TypeVar

import orjson
from numpy.typing import NDArray

T = TypeVar("T")
Pieces: TypeAlias = bytes | tuple[bytes, ...]
"""The body of an answer; a large one in the pieces in which it was made, which are sent one by one."""

STEP_VALUES: Final = 4096
"""Numbers that are written at a time. The lock is held meanwhile: about a fifth of a millisecond for floats."""

PIECE_BYTES: Final = 2**16
"""What is shorter goes out together with what follows it."""

_OPTIONS: Final = orjson.OPT_SERIALIZE_NUMPY


class EncodedJson:
    """JSON that is there already, in parts, to stand in a larger answer: they are copied once, into its pieces."""

    __slots__ = ("parts",)

    def __init__(self, parts: Iterable[bytes | memoryview]) -> None:
        self.parts = tuple(parts)


def dump(answer: object) -> bytes:
    """JSON of an answer; arrays become lists of numbers, each the shortest that reads back as the same float32."""
    return orjson.dumps(answer, _encoded, _OPTIONS)


def dump_array(array: NDArray[Any]) -> EncodedJson:
    """JSON of an array that has too many numbers for one step: of one row, or of several."""
    step = STEP_VALUES if array.ndim < 2 else max(1, STEP_VALUES // array.shape[-1])
    rows = (array[start : start + step] for start in range(0, len(array), step))
    return EncodedJson((b"[", *_separated([_inside(part)] for part in with_pauses(map(dump, rows))), b"]"))


def average(total: int, count: int) -> int:
    """Of `count` items that have so many numbers together, rounded up."""
    return -(-total // max(1, count))


def entry_values(texts: Sequence[str]) -> int:
    """How many numbers take as long to write as one of these texts, and what stands beside it in a list."""
    return 32 + average(sum(map(len, texts)), len(texts)) // 16


def dump_list(items: Iterable[object], *, item_values: int) -> Pieces:
    """JSON of a list.

    Args:
        items: Made as they are written.
        item_values: How many numbers each has, on average.
    """
    first, others, is_all = _begun(items, item_values)
    return dump(first) if is_all else _in_steps(b"[", first, others, b"]")


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
    first, others, is_all = _begun(items, item_values)
    if is_all:
        return dump({**before, name: first, **after})
    opening = dump(before)[:-1] + b"," + dump(name) + b":["
    return _in_steps(opening, first, others, b"]," + dump(after)[1:])


def joined(parts: Iterable[Pieces]) -> Pieces:
    """Contents one after the other; what is small becomes one piece with its neighbours."""
    return _gathered(piece for part in parts for piece in ((part,) if isinstance(part, bytes) else part))


def _begun(items: Iterable[object], item_values: int) -> tuple[list[object], Iterator[list[object]], bool]:
    """What is written in the first step, and in each of the others; and whether one step writes all of it."""
    size = max(1, STEP_VALUES // max(1, item_values))
    groups = _groups(iter(items), size)
    first = next(groups, [])
    return first, groups, len(first) < size


def _in_steps(opening: bytes, first: list[object], others: Iterator[list[object]], ending: bytes) -> Pieces:
    steps = _separated(with_pauses(map(_parts, chain((first,), others))))
    return _gathered(chain((opening,), steps, (ending,)))


def _groups(items: Iterator[object], size: int) -> Iterator[list[object]]:
    while group := list(islice(items, size)):
        yield group


def _parts(group: Sequence[object]) -> list[bytes | memoryview]:
    """JSON of some items of a list."""
    if not any(map(_holds_encoded, group)):
        return [_inside(dump(group))]
    return list(_separated(map(_item_parts, group)))


def _holds_encoded(item: object) -> bool:
    return isinstance(item, EncodedJson) or (
        isinstance(item, dict) and any(isinstance(value, EncodedJson) for value in item.values())
    )


def _item_parts(item: object) -> Iterator[bytes | memoryview]:
    if isinstance(item, EncodedJson):
        yield from item.parts
    elif isinstance(item, dict) and item:
        for place, (name, value) in enumerate(item.items()):
            yield (b"," if place else b"{") + dump(name) + b":"
            yield from value.parts if isinstance(value, EncodedJson) else (dump(value),)
        yield b"}"
    else:
        yield dump(item)


def _inside(listed: bytes) -> memoryview:
    """A list without its brackets."""
    return memoryview(listed)[1:-1]


def _separated(items: Iterable[Iterable[bytes | memoryview]]) -> Iterator[bytes | memoryview]:
    for place, parts in enumerate(items):
        if place:
            yield b","
        yield from parts


def _gathered(parts: Iterable[bytes | memoryview]) -> Pieces:
    """The parts, each copied once, in pieces that are not small."""
    pieces: list[bytes] = []
    gathered: list[bytes | memoryview] = []
    size = 0
    for part in parts:
        gathered.append(part)
        size += len(part)
        if size >= PIECE_BYTES:
            pieces.append(b"".join(gathered))
            gathered, size = [], 0
    if gathered or not pieces:
        pieces.append(b"".join(gathered))
    return pieces[0] if len(pieces) == 1 else tuple(pieces)


def _encoded(value: object) -> orjson.Fragment:
    if isinstance(value, EncodedJson):
        return orjson.Fragment(b"".join(value.parts))
    raise TypeError(f"no JSON of a {type(value).__name__}")


def with_pauses(steps: Iterable[T]) -> Iterator[T]:
    """Each step; between two, whoever waits for the interpreter's lock may take it, unless it was free a moment ago."""
    free_at = time.perf_counter()
    for place, step in enumerate(steps):
        if place >= _INLINE_STEPS and time.perf_counter() - free_at > _HELD_S:
            time.sleep(_PAUSE_S)
            free_at = time.perf_counter()
        yield step


_PAUSE_S: Final = 1e-6
"""Sleeping gives the lock up."""
_HELD_S: Final = 1e-4
_INLINE_STEPS: Final = 4
"""Answers of so few items are written on the event loop, which must not sleep."""
