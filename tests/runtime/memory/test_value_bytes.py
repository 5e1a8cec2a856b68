"""Bytes of values: one walk, whatever the value is, and none through code of users on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.runtime.memory.value_bytes import (
    CONTAINER_BYTES,
    INLINE_ENTRIES,
    STEP_ENTRIES,
    TEXT_BYTES,
    bytes_of,
    plain_bytes,
)
from staged_pool.runtime.pipelines.items import Embedding


@dataclass
class Mine:
    numbers: list[float]


class Endless(Mapping[str, int]):
    """A mapping that has no end, of texts without letters."""

    def __getitem__(self, key: str) -> int:
        return 0

    def __iter__(self) -> Iterator[str]:
        return repeat("")

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("value", "numbers", "others"),
    [
        (np.zeros((3, 4), np.float32), 12, 0),
        ([1.0, None, [2, 3]], 4, 2 * CONTAINER_BYTES),
        ({"a" * 100: np.zeros(5)}, 5, CONTAINER_BYTES + 100 + TEXT_BYTES),
        (Embedding(multi_vector=np.zeros((2, 4), np.float32)), 11, CONTAINER_BYTES),
        ("x" * 100, 0, 100 + TEXT_BYTES),
        ([[0.5] * 3] * 10, 30, 11 * CONTAINER_BYTES),
        ({1, 2, 3}, 3, CONTAINER_BYTES),
    ],
)
def test_a_value_counts_for_what_is_in_it(value: object, numbers: int, others: int) -> None:
    assert bytes_of(value, 100) == plain_bytes(value, 100) == 100 * numbers + others


PLAIN = st.recursive(
    st.none() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=4),
    max_leaves=40,
)


@given(PLAIN)
def test_both_ways_of_counting_agree(value: object) -> None:
    assert bytes_of(value, 17) == plain_bytes(value, 17)
    assert bytes_of([value, value], 17) == CONTAINER_BYTES + 2 * bytes_of(value, 17)


def test_a_value_that_contains_itself_counts_once() -> None:
    tree: dict[str, Any] = {"name": "root", "children": []}
    tree["children"] += [{"name": "one", "parent": tree}, {"name": "two", "parent": tree}]
    assert plain_bytes(tree, 17) is None
    texts = ("name", "root", "children", "name", "one", "parent", "name", "two", "parent")
    assert bytes_of(tree, 17) == 4 * CONTAINER_BYTES + sum(len(text) + TEXT_BYTES for text in texts)


def test_what_is_shared_counts_as_often_as_it_is_written_and_takes_one_visit() -> None:
    value: list[Any] = [1.0]
    for _ in range(50):
        value = [value, value]
    assert bytes_of(value, 17) == 2**50 * (17 + CONTAINER_BYTES) + (2**50 - 1) * CONTAINER_BYTES


def test_a_value_without_end_is_counted_up_to_the_limit_and_not_beyond_a_step() -> None:
    entries = 0

    def counted() -> Iterator[str]:
        nonlocal entries
        while True:
            entries += 1
            yield ""

    class Counted(Endless):
        def __iter__(self) -> Iterator[str]:
            return counted()

    assert 1000 < bytes_of(Counted(), 17, 1000) < 1000 + STEP_ENTRIES * 20
    assert entries <= STEP_ENTRIES


def test_a_value_that_is_nested_deeply_is_no_recursion() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    assert bytes_of(value, 17) == 100_001 * CONTAINER_BYTES
    while value:  # its own end would recurse
        value = value[0]


class Rude(dict[str, int]):
    def items(self) -> Any:
        raise ZeroDivisionError


class Pretends:
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "make", [lambda: Rude(a=1), Pretends, lambda: Mine([1.0]), Endless, lambda: [0.0] * (INLINE_ENTRIES + 1)]
)
def test_large_values_and_those_of_other_classes_are_not_counted_at_once(make: Callable[[], object]) -> None:
    assert plain_bytes(make(), 17) is None
    assert plain_bytes([{"a": make()}], 17) is None


@pytest.mark.parametrize("make", [lambda: Rude(a=1), Pretends])
def test_what_a_value_raises_passes(make: Callable[[], object]) -> None:
    with pytest.raises(ZeroDivisionError):
        bytes_of([make()], 17)


def test_a_dataclass_of_a_user_counts_by_its_fields() -> None:
    assert bytes_of(Mine([1.0] * 10), 17) == 170 + 2 * CONTAINER_BYTES
