"""The result cache: rows of earlier inputs, so that equal inputs are not computed again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Final

import numpy as np

from staged_pool.runtime.payloads import Payload, Row, SparseVector, Values
from staged_pool.runtime.requests import Output
from staged_pool.runtime.statistics import ResultCacheStatistics

_ENTRY_BYTES: Final = 640
"""Bytes of an entry beside its numbers: its key, its place, and the objects around its arrays.

Measured: 516 bytes for one vector, and about 120 for each further array.
"""

_SCOPE_BYTES: Final = 192
"""Further bytes of an entry whose key has a scope: two tuples and a digest."""


class ResultCache:
    """A least-recently-used cache of rows. It belongs to the event loop of the engine.

    It keeps rows as the device gives them. Each request normalises, cuts or activates them anew. An input is kept only
    as its identity, which means nothing outside this process.

    Args:
        max_bytes: Size of the cache. A larger row is not cached.
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
        """Return the cached row of an identity; None if there is none.

        Its arrays are read-only, because all requests that get the row share them.

        Args:
            identity: Identity of the payload.
            payload: Payload of the row.
        """
        values = self._kept.get(identity)
        if values is None:
            self._misses += 1
            return None
        self._kept.move_to_end(identity)
        self._hits += 1
        return Row(values, payload)

    def keep(self, identity: Hashable, row: Row, /) -> None:
        """Cache a row, unless its identity has one: later requests must get the same values."""
        size = _size(identity, row.values)
        if identity in self._kept or size > self._max_bytes:
            return
        # Copies: the rows of a batch are views of one array, and each would keep all of it.
        self._kept[identity] = {output: _frozen(_copied(values)) for output, values in row.values.items()}
        self._bytes += size
        while self._bytes > self._max_bytes:
            key, oldest = self._kept.popitem(last=False)
            self._bytes -= _size(key, oldest)

    def clear(self) -> None:
        """Drop all rows. Rows that the device gives later are cached again."""
        self._kept.clear()
        self._bytes = 0


def freeze(row: Row) -> None:
    """Make the arrays of a row read-only."""
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
