"""Ranges are the set of their numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.api.bulk.ranges import Ranges

PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda pair: (pair[0], pair[0] + pair[1])))


@given(PAIRS)
def test_ranges_hold_the_numbers_that_were_added(pairs: list[tuple[int, int]]) -> None:
    numbers = {number for first, end in pairs for number in range(first, end)}
    ranges = Ranges(pairs)
    assert {number for number in range(100) if number in ranges} == numbers
    assert len(ranges) == len(numbers)
    assert ranges.end == max(numbers, default=-1) + 1


@given(PAIRS)
def test_ranges_are_ordered_and_do_not_touch(pairs: list[tuple[int, int]]) -> None:
    found = list(Ranges(pairs))
    assert all(end < first for (_, end), (first, _) in pairwise(found))
    assert list(Ranges(found)) == found


@given(st.permutations(range(30)))
def test_all_numbers_in_any_order_are_one_range(numbers: list[int]) -> None:
    ranges = Ranges()
    for number in numbers:
        ranges.add(number)
    assert list(ranges) == [(0, 30)]
    ranges.clear()
    assert list(ranges) == []


@pytest.mark.parametrize(("first", "end"), [(-1, 2), (3, 3), (4, 2)])
def test_a_range_must_have_numbers(first: int, end: int) -> None:
    with pytest.raises(ValueError, match="begins at 0 or above"):
        Ranges().add(first, end)


def test_only_numbers_are_in_ranges() -> None:
    assert "1" not in Ranges([(0, 5)])
