"""JSON encoding of large answers, in steps short enough not to delay the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

T = TypeVar("T")
Pieces: TypeAlias = bytes | tuple[bytes, ...]
"""Body of an answer: one piece, or several pieces that are sent one by one."""


STEP_VALUES: Final = 4096
"""Numbers that are written in one step, under the GIL: about 0.2 ms for floats."""

JSON_CHUNK_BYTES: Final = 2**16
"""Minimum size of a piece, in bytes; shorter parts are joined with the next ones."""

_SPLIT_LEVELS: Final = 4
"""Levels of lists and objects of any value that are encoded in steps."""

_SHORT: Final = frozenset({int, float, bool, type(None)})
"""Types of most values; each counts as one number."""

_OPTIONS: Final = orjson.OPT_SERIALIZE_NUMPY


class EncodedJson:
    """JSON that is already encoded, in parts; they are copied once, into the pieces of an answer."""

    __slots__ = ("parts",)

    def __init__(self, parts: Iterable[bytes | memoryview]) -> None:
        self.parts = tuple(parts)


def pieces_of(body: Pieces) -> tuple[bytes, ...]:
    """Return the pieces of a body."""
    return (body,) if isinstance(body, bytes) else body


def size_of(body: Pieces) -> int:
    """Return the bytes of a body."""
    return len(body) if isinstance(body, bytes) else sum(map(len, body))


def dump(answer: object) -> bytes:
    """Encode an answer; arrays become lists with the shortest numbers that restore the float32 values."""
    return orjson.dumps(answer, _encoded, _OPTIONS)


def dump_array(array: NDArray[Any]) -> EncodedJson:
    """Encode an array, [width] or [rows, width], in steps."""
    step = STEP_VALUES if array.ndim < 2 else max(1, STEP_VALUES // array.shape[-1])
    rows = (array[start : start + step] for start in range(0, len(array), step))
    return EncodedJson((b"[", *_separated([_inside(part)] for part in with_pauses(map(dump, rows))), b"]"))


def average(total: int, count: int) -> int:
    """Return `total` divided by `count`, rounded up."""
    return -(-total // max(1, count))


def entry_values(texts: Sequence[str]) -> int:
    """Estimate the average cost of an object with one of these texts.

    The unit is the time to write one number.
    """
    return 32 + average(sum(map(len, texts)), len(texts)) // 16


def dump_list(items: Iterable[object], *, item_values: int) -> Pieces:
    """Encode a list in steps.

    Args:
        items: The items; consumed while they are written.
        item_values: Average number of values in an item.
    """
    first, others, is_all = _begun(items, item_values)
    return dump(first) if is_all else _in_steps(b"[", first, others, b"]")


def dump_around(
    before: Mapping[str, object], name: str, items: Iterable[object], after: Mapping[str, object], *, item_values: int
) -> Pieces:
    """Encode an object with one large list, in steps.

    Args:
        before: The entries before the list; at least one.
        name: Key of the list.
        items: See `dump_list`.
        after: The entries after the list; at least one.
        item_values: See `dump_list`.
    """
    first, others, is_all = _begun(items, item_values)
    if is_all:
        return dump({**before, name: first, **after})
    opening = dump(before)[:-1] + b"," + dump(name) + b":["
    return _in_steps(opening, first, others, b"]," + dump(after)[1:])


def dump_any(value: object) -> Pieces:
    """Encode any value in steps: large arrays and lists in it are never one text.

    Raises:
        orjson.JSONEncodeError: The value is no JSON.
    """
    return _gathered(with_pauses(_any_parts(value, _SPLIT_LEVELS)))


def _any_parts(value: object, levels: int) -> Iterator[bytes | memoryview]:
    """Encode a value in parts; below some levels, as a whole."""
    if isinstance(value, np.ndarray) and value.ndim in (1, 2) and value.size > STEP_VALUES:
        yield from dump_array(value).parts
    elif not levels or not isinstance(value, dict | list | tuple):
        yield dump(value)
    elif isinstance(value, dict):
        separator = b"{"
        for run in _runs(value.items(), _values_of_pair):
            yield separator
            if isinstance(run, _Large):
                name, entry = run.entry
                yield dump({name: None})[1:-5]  # a name that is no text is an error, as everywhere
                yield from _any_parts(entry, levels - 1)
            else:
                yield _inside(dump(dict(run)))
            separator = b","
        yield b"}" if value else b"{}"
    else:
        separator = b"["
        for run in _runs(value, _values_in):
            yield separator
            if isinstance(run, _Large):
                yield from _any_parts(run.entry, levels - 1)
            else:
                yield _inside(dump(run))
            separator = b","
        yield b"]" if value else b"[]"


class _Large(NamedTuple, Generic[T]):
    """An entry that is more than one step by itself."""

    entry: T


def _runs(entries: Iterable[T], values_in: Callable[[T], int]) -> Iterator[list[T] | _Large[T]]:
    """Yield runs of small entries, one step each, and large ones by themselves."""
    small: list[T] = []
    total = 0
    for entry in entries:
        values = values_in(entry)
        if small and total + values > STEP_VALUES:
            yield small
            small, total = [], 0
        if values > STEP_VALUES:
            yield _Large(entry)
        else:
            small.append(entry)
            total += values
    if small:
        yield small


def _values_of_pair(pair: tuple[object, object]) -> int:
    return 1 + _values_in(pair[1])


def _values_in(entry: object) -> int:
    """Estimate the time to write an entry, in that of a number. One that is too long for a step is not counted on."""
    if type(entry) in _SHORT:
        return 1
    count = 0
    left: list[Collection[object]] = [(entry,)]
    while left:
        group = left.pop()
        count += len(group)
        if count > STEP_VALUES:
            break
        for each in group:
            if type(each) in _SHORT:
                continue
            if isinstance(each, str):
                count += len(each) // 16
            elif isinstance(each, dict):
                count += len(each)
                left.append(each.values())
            elif isinstance(each, list | tuple):
                left.append(each)
            elif isinstance(each, np.ndarray):
                count += each.size
    return count


def joined(parts: Iterable[Pieces]) -> Pieces:
    """Join bodies one after the other; small pieces are merged."""
    return _gathered(piece for part in parts for piece in ((part,) if isinstance(part, bytes) else part))


def _begun(items: Iterable[object], item_values: int) -> tuple[list[object], Iterator[list[object]], bool]:
    """Split items into the group of the first step and those of the others; True: there are no others."""
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
    """Encode some items of a list."""
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
    """Return an encoded list without its brackets."""
    return memoryview(listed)[1:-1]


def _separated(items: Iterable[Iterable[bytes | memoryview]]) -> Iterator[bytes | memoryview]:
    for place, parts in enumerate(items):
        if place:
            yield b","
        yield from parts


def _gathered(parts: Iterable[bytes | memoryview]) -> Pieces:
    """Merge parts into pieces of at least `JSON_CHUNK_BYTES`; each is copied once."""
    pieces: list[bytes] = []
    gathered: list[bytes | memoryview] = []
    size = 0
    for part in parts:
        gathered.append(part)
        size += len(part)
        if size >= JSON_CHUNK_BYTES:
            pieces.append(b"".join(gathered))
            gathered, size = [], 0
    if gathered or not pieces:
        pieces.append(b"".join(gathered))
    return pieces[0] if len(pieces) == 1 else tuple(pieces)


def _encoded(value: object) -> orjson.Fragment | list[object]:
    if isinstance(value, EncodedJson):
        return orjson.Fragment(b"".join(value.parts))
    if isinstance(value, tuple):  # a named one
        return list(value)
    raise TypeError(f"no JSON of a {type(value).__name__}")


def with_pauses(steps: Iterable[T]) -> Iterator[T]:
    """Yield each step; release the GIL between two steps if it was held for longer than `_HELD_S`."""
    free_at = time.perf_counter()
    for place, step in enumerate(steps):
        if place >= _INLINE_STEPS and time.perf_counter() - free_at > _HELD_S:
            time.sleep(_PAUSE_S)
            free_at = time.perf_counter()
        yield step


_PAUSE_S: Final = 1e-6
"""Pause in seconds; any sleep releases the GIL."""
_HELD_S: Final = 1e-4
_INLINE_STEPS: Final = 4
"""Steps without a pause: answers this short are written on the event loop, which must not sleep."""
