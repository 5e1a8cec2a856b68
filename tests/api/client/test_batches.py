"""Long lists are cut into requests: nothing is lost, doubled or moved."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from staged_pool.client.batches import Stretch, cut
from staged_pool.client.contents import Given

IDS = st.lists(st.integers(0, 9), min_size=1, max_size=5).map(tuple)
INPUTS = st.lists(st.one_of(st.text(max_size=8), st.tuples(st.text(max_size=4), st.text(max_size=4)), IDS))


@given(INPUTS, st.integers(1, 5), st.integers(1, 40))
def test_every_input_is_in_exactly_one_stretch_in_order(
    inputs: list[Given], max_items: int, max_characters: int
) -> None:
    found = list(cut(inputs, max_items=max_items, max_characters=max_characters))
    assert [place for one in found for place in range(one.first, one.last)] == list(range(len(inputs)))
    assert all(one.count <= max_items for one in found)
    assert all(one.count for one in found) or found == [Stretch(0, 0)]


def test_stretches_are_as_long_as_they_may_be() -> None:
    assert list(cut(["a"] * 7, max_items=3)) == [Stretch(0, 3), Stretch(3, 3), Stretch(6, 1)]


def test_a_stretch_holds_so_many_characters_and_a_longer_text_goes_alone() -> None:
    found = list(cut(["aa", "aa", "a" * 9, "aa", "aa"], max_items=9, max_characters=4))
    assert found == [Stretch(0, 2), Stretch(2, 1), Stretch(3, 2)]


def test_a_stretch_is_of_one_form() -> None:
    found = list(cut(["a", (1, 2), (3,), ("a", "b"), "c"], max_items=9))
    assert found == [Stretch(0, 1), Stretch(1, 2), Stretch(3, 1), Stretch(4, 1)]


def test_no_inputs_are_one_request_that_the_server_refuses() -> None:
    assert list(cut([], max_items=9)) == [Stretch(0, 0)]
