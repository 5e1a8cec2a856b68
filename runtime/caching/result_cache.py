"""Rows that are kept, so that an input that comes again does not go through the device again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Final

import numpy as np

from staged_pool.runtime.model import Payload, Row, SparseVector, Values
from staged_pool.runtime.requests import Output
from staged_pool.runtime.statistics import ResultCacheStatistics

_ENTRY_BYTES: Final = 640
"""Bytes of an entry beside its numbers: its key, its place, and the objects around its arrays. Measured: 516 for one
vector; 120 or so for each further array."""

_SCOPE_BYTES: Final = 192
"""Bytes of the key of a row that is shared within a tenant or a salt only, beside those: two tuples and a digest."""


class ResultCache:
    """Keeps what was used last, up to a number of bytes. It belongs to the event loop that runs the engine.

    What is kept is what the device gave: before it is normalised, cut or activated as a request wants it, which is
    done anew for each. Of an input there is only its identity, which says nothing outside this process.

    Args:
        max_bytes: Of the rows that are kept. What is larger than all of it is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, Mapping[Output, Values]] = OrderedDict()
        self._bytes = 0
        self._hits = 0
        self._misses = 0

    @property
    def statistics(self) -> ResultCacheStatistics:
        return ResultCacheStatistics(
            hits=self._hits,
            misses=self._misses,
            entries=len(self._kept),
            bytes=self._bytes,
            max_bytes=self._max_bytes,
        )

    def get(self, identity: Hashable, payload: Payload, /) -> Row | None:
        """The row of an input of this identity; None if none is kept.

        Its values are shared by all who get them: nobody may write to them, and numpy sees to it.

        Args:
            identity: Of the payload.
            payload: What the row is to be of.
        """
        values = self._kept.get(identity)
        if values is None:
            self._misses += 1
            return None
        self._kept.move_to_end(identity)
        self._hits += 1
        return Row(values, payload)

    def keep(self, identity: Hashable, row: Row, /) -> None:
        """Keep a row, unless one of the same identity is kept already: whoever asks again gets the very same."""
        size = _size(identity, row.values)
        if identity in self._kept or size > self._max_bytes:
            return
        # Copies: the rows of a batch are views of one array, all of which each of them would hold.
        self._kept[identity] = {output: _frozen(_copied(values)) for output, values in row.values.items()}
        self._bytes += size
        while self._bytes > self._max_bytes:
            key, oldest = self._kept.popitem(last=False)
            self._bytes -= _size(key, oldest)

    def clear(self) -> None:
        """Forget every row. Those that are still to come from the device are kept again."""
        self._kept.clear()
        self._bytes = 0


def freeze(row: Row) -> None:
    """See to it that nobody can write to a row any more."""
    for values in row.values.values():
        _frozen(values)


def _frozen(values: Values) -> Values:
    for array in (values.indices, values.values) if isinstance(values, SparseVector) else (values,):
        array.flags.writeable = False
    return values


def _copied(values: Values) -> Values:
    if isinstance(values, SparseVector):
        return SparseVector(values.indices.copy(), values.values.copy())
    return np.array(values)


def _size(identity: Hashable, values: Mapping[Output, Values]) -> int:
    key = 0 if isinstance(identity, bytes) else _SCOPE_BYTES
    return _ENTRY_BYTES + key + sum(_number_bytes(each) for each in values.values())


def _number_bytes(values: Values) -> int:
    return values.indices.nbytes + values.values.nbytes if isinstance(values, SparseVector) else values.nbytes
