"""Sets of whole numbers, kept as ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Final

Pair = tuple[int, int]
"""First number of a range, and the number after its last one."""


class Ranges:
    """Set of numbers from 0 on. Its memory grows with its gaps, not with its numbers."""

    def __init__(self, pairs: Iterable[Pair] = ()) -> None:
        self._starts: Final[list[int]] = []
        self._ends: Final[list[int]] = []
        for first, end in pairs:
            self.add(first, end)

    def add(self, first: int, end: int | None = None) -> None:
        """Add the numbers from `first` to before `end`; without `end`, one number."""
        end = first + 1 if end is None else end
        if not 0 <= first < end:
            raise ValueError(f"[{first}, {end}): a range begins at 0 or above, and ends above its beginning")
        low, high = bisect_left(self._ends, first), bisect_right(self._starts, end)
        if low < high:  # ranges that touch the new one become part of it
            first, end = min(first, self._starts[low]), max(end, self._ends[high - 1])
        self._starts[low:high], self._ends[low:high] = [first], [end]

    def clear(self) -> None:
        """Remove all numbers."""
        self._starts.clear()
        self._ends.clear()

    @property
    def end(self) -> int:
        """The number after the largest one; 0 if there is none."""
        return self._ends[-1] if self._ends else 0

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        place = bisect_right(self._starts, number) - 1
        return place >= 0 and number < self._ends[place]

    def __iter__(self) -> Iterator[Pair]:
        return iter(zip(self._starts, self._ends, strict=True))

    def __len__(self) -> int:
        return sum(self._ends) - sum(self._starts)
