"""Names of the requests of a job, in few bytes each: a job may have ten million."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from struct import Struct
from typing import Final

_WORDS: Final = Struct("<QQ")
_TABLES: Final = 64
"""Tables, each with a part of the ids: a table that grows is copied, and the copy of all at once would be a peak."""

_FIRST_SLOTS: Final = 8
_NUMBER_BITS: Final = 40
_NUMBER: Final = 2**_NUMBER_BITS - 1


class CustomIds:
    """The ids of the lines so far, with the line of each.

    An id takes 16 bytes of a table that is at least three eighths full: 88 bits of its hash, and the number of its
    line. Two of ten million ids have the same 88 bits once in 10^12 jobs.
    """

    def __init__(self) -> None:
        self._tables = [_Table() for _ in range(_TABLES)]

    def first_line(self, custom_id: str, number: int) -> int:
        """Return the first line that has an id; the given one if the id is new.

        Args:
            custom_id: The id.
            number: Number of the line that has it, from 0 to 2^40 - 2.
        """
        place: int
        rest: int
        place, rest = _WORDS.unpack(blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest())
        return self._tables[place % _TABLES].first(place, rest | _NUMBER, number + 1) - 1

    @property
    def size(self) -> int:
        """Bytes of the tables."""
        return sum(8 * len(table.words) for table in self._tables)


class _Table:
    """Slots of two words, found by open addressing. An empty slot is zero."""

    def __init__(self) -> None:
        self.words = _zeros(_FIRST_SLOTS)
        self._mask = _FIRST_SLOTS - 1
        self._used = 0

    def first(self, place: int, marked: int, number: int) -> int:
        """Return the number that is kept for a hash; keep the given one if there is none.

        Args:
            place: First 64 bits of the hash.
            marked: The other bits of the hash that count, above a number of ones alone.
            number: Number to keep, from 1.
        """
        words = self.words
        slot = _slot_of(place, self._mask)
        while kept := words[slot + 1]:
            if words[slot] == place and kept | _NUMBER == marked:
                return kept & _NUMBER
            slot = (slot + 2) & (2 * self._mask + 1)
        words[slot], words[slot + 1] = place, marked - _NUMBER + number
        self._used += 1
        if 4 * self._used > 3 * (self._mask + 1):
            self._grow()
        return number

    def _grow(self) -> None:
        old = self.words
        self._mask = 2 * self._mask + 1
        self.words = words = _zeros(self._mask + 1)
        for at in range(0, len(old), 2):
            if old[at + 1]:
                slot = _slot_of(old[at], self._mask)
                while words[slot + 1]:
                    slot = (slot + 2) & (2 * self._mask + 1)
                words[slot], words[slot + 1] = old[at], old[at + 1]


def _slot_of(place: int, mask: int) -> int:
    """Return the first word of the slot of a hash."""
    return 2 * (place // _TABLES & mask)


def _zeros(slots: int) -> array[int]:
    return array("Q", bytes(16 * slots))
