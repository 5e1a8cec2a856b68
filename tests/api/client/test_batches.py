"""Long lists are cut into requests: nothing is lost, doubled or moved."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from staged_pool.client.batches import split
from staged_pool.client.contents import Given
from staged_pool.runtime.input_ranges import InputRange

IDS = st.lists(st.integers(0, 9), min_size=1, max_size=5).map(tuple)
INPUTS = st.lists(st.one_of(st.text(max_size=8), st.tuples(st.text(max_size=4), st.text(max_size=4)), IDS))


@given(INPUTS, st.integers(1, 5), st.integers(1, 40))
def test_every_input_is_in_exactly_one_stretch_in_order(
    inputs: list[Given], max_items: int, max_characters: int
) -> None:
    found = list(split(inputs, max_items=max_items, max_characters=max_characters))
    assert [place for one in found for place in range(one.first, one.last)] == list(range(len(inputs)))
    assert all(one.count <= max_items for one in found)
    assert all(one.count for one in found) or found == [InputRange(0, 0)]


def test_batches_are_as_long_as_they_may_be() -> None:
    assert list(split(["a"] * 7, max_items=3)) == [InputRange(0, 3), InputRange(3, 3), InputRange(6, 1)]


def test_a_batch_holds_max_characters_and_a_longer_text_goes_alone() -> None:
    found = list(split(["aa", "aa", "a" * 9, "aa", "aa"], max_items=9, max_characters=4))
    assert found == [InputRange(0, 2), InputRange(2, 1), InputRange(3, 2)]


def test_a_batch_is_of_one_form() -> None:
    found = list(split(["a", (1, 2), (3,), ("a", "b"), "c"], max_items=9))
    assert found == [InputRange(0, 1), InputRange(1, 2), InputRange(3, 1), InputRange(4, 1)]


def test_no_inputs_are_one_request_that_the_server_rejects() -> None:
    assert list(split([], max_items=9)) == [InputRange(0, 0)]
