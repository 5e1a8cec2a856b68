"""Bytes of values that users have made, counted by one walk through them.

A value may be large, contain itself, or be of a class whose methods raise errors, hang and have no end. So only small
values of known classes are counted on the event loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import chain, islice
from typing import Any, Final

import numpy as np

INLINE_ENTRIES: Final = 1024
"""Most entries that are counted on the event loop: about 0.2 ms."""

STEP_ENTRIES: Final = 4096
"""Entries of one step in a thread: about 0.1 ms, in which no other thread runs."""

TEXT_BYTES: Final = 2
"""Bytes of a text beside its letters: its quotes in JSON."""

CONTAINER_BYTES: Final = 64
"""Bytes of a list, or of any other container, beside its entries: those of Python's own list."""

MOST_FORGOTTEN_BYTES: Final = 1024
"""A container of at most these bytes, with none inside, is counted each time.

To remember it would take as much memory."""

UNLIMITED: Final = 2**62

_NUMBERS: Final = frozenset({int, float, bool, complex, type(None)})
_TEXTS: Final = (str, bytes, bytearray)
_LISTS: Final = frozenset({list, tuple, set, frozenset})
_OURS: Final = "staged_pool."


def plain_bytes(value: object, number_bytes: int) -> int | None:
    """Estimate the memory of a small value of known classes; no code of users runs.

    Args:
        value: See `bytes_of`.
        number_bytes: Bytes of a number.

    Returns:
        The bytes. None: the value is larger than `INLINE_ENTRIES`, or something in it is of another class.
    """
    count, entries, left = 0, 0, [value]
    while left:
        each = left.pop()
        kind = type(each)
        if kind in _NUMBERS:
            count += number_bytes
        elif kind in _TEXTS:
            count += len(each) + TEXT_BYTES  # type: ignore[arg-type]
        elif kind is np.ndarray:
            count += each.size * number_bytes  # type: ignore[attr-defined]
        elif (inside := _plain_entries(each)) is None:
            return None
        else:
            entries += len(inside)
            if entries > INLINE_ENTRIES:
                return None
            count += CONTAINER_BYTES
            left += inside
    return count


def _plain_entries(value: Any) -> Collection[object] | None:
    """Return the entries of a container of a known class; None for any other value."""
    kind = type(value)
    if kind in _LISTS:
        return value  # type: ignore[no-any-return]
    if kind is dict:
        return [*value, *value.values()]
    if type(kind) is type and kind.__module__.startswith(_OURS) and is_dataclass(value):
        return [getattr(value, part.name) for part in fields(value)]
    return None


def bytes_of(value: object, number_bytes: int, most: int = UNLIMITED) -> int:
    """Estimate the memory of a value, such as the output of a function. Call it within the boundary to user code.

    A part that comes several times counts each time, as it is written each time. A part that contains itself counts
    once.

    Args:
        value: Arrays, texts, numbers, and containers and dataclasses of them. Anything else counts as one number.
        number_bytes: Bytes of a number.
        most: Bytes above which nothing more is counted.

    Returns:
        The bytes; some number above `most` if there are more.

    Raises:
        Exception: A method of the value has raised it.
    """
    return _Walk(number_bytes, most).bytes_of(value)


@dataclass(slots=True)
class _Open:
    """A container whose entries are counted now."""

    value: object
    before: int
    """Bytes that were counted before it."""
    entries: Iterator[object]
    step: Iterator[object] = field(default_factory=lambda: iter(()))
    has_inner: bool = False
    """True if a container is in it."""


class _Walk:
    """One walk through a value, without recursion: it may be nested deeply."""

    def __init__(self, number_bytes: int, most: int) -> None:
        self._number_bytes = number_bytes
        self._most = most
        self._count = 0
        self._open: list[_Open] = []
        self._known: dict[int, tuple[object, int]] = {}
        """Containers by id, with their bytes; none yet while they are open. An id belongs to an object that lives."""

    def bytes_of(self, value: object) -> int:
        """See the function."""
        self._enter(value)
        while self._open and self._count <= self._most:
            last = self._open[-1]
            for each in last.step:
                if self._enter(each):
                    last.has_inner = True
                    break
            else:
                self._next_step(last)
        return self._count

    def _next_step(self, last: _Open) -> None:
        step = list(islice(last.entries, STEP_ENTRIES))
        if not step:
            self._open.pop()
            size = self._count - last.before
            if last.has_inner or size > MOST_FORGOTTEN_BYTES:
                self._known[id(last.value)] = last.value, size
            else:
                del self._known[id(last.value)]
        elif _NUMBERS.issuperset(map(type, step)):
            self._count += len(step) * self._number_bytes
        else:
            last.step = iter(step)

    def _enter(self, value: object) -> bool:
        """Count a value, or open it. Returns True for a container."""
        if isinstance(value, _TEXTS):
            self._count += len(value) + TEXT_BYTES
        elif isinstance(value, np.ndarray):
            self._count += max(1, value.size * self._number_bytes)
        elif isinstance(value, memoryview):
            self._count += value.nbytes + TEXT_BYTES
        elif (entries := _entries(value)) is None:
            self._count += self._number_bytes
        else:
            if (known := self._known.get(id(value))) is not None:
                self._count += known[1]
            else:
                self._known[id(value)] = value, 0
                self._open.append(_Open(value, self._count, entries))
                self._count += CONTAINER_BYTES
            return True
        return False


def _entries(value: object) -> Iterator[object] | None:
    """Return the entries of a container, which may have no end; None for any other value."""
    if isinstance(value, Mapping):
        return chain.from_iterable(value.items())
    if isinstance(value, Sequence | Set):
        return iter(value)
    if is_dataclass(value) and not isinstance(value, type):
        return (getattr(value, part.name) for part in fields(value))
    return None
