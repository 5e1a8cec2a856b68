"""Division of the inputs of a call between requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from staged_pool.runtime import input_ranges
from staged_pool.runtime.input_ranges import REQUEST_ITEMS, InputRange, portions
from staged_pool.runtime.requests import Image


def test_requests_have_a_number_of_inputs_at_most() -> None:
    found = list(portions(map(str, range(2 * REQUEST_ITEMS + 3)), may_be_empty=True))
    assert [portion.range.count for portion in found] == [REQUEST_ITEMS, REQUEST_ITEMS, 3]
    assert [portion.first for portion in found] == [0, REQUEST_ITEMS, 2 * REQUEST_ITEMS]
    assert [text for portion in found for text in portion.inputs] == [*map(str, range(2 * REQUEST_ITEMS + 3))]
    assert found[-1].range == InputRange(2 * REQUEST_ITEMS, 3)


LARGE = 1000


@pytest.mark.parametrize(
    "large",
    ["x" * LARGE, Image(b"x" * LARGE), ("a", "x" * LARGE), list(range(LARGE))],
    ids=["text", "image", "pair", "token ids"],
)
def test_a_large_input_is_a_request_of_its_own(large: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_ranges, "REQUEST_BYTES", LARGE)
    found = list(portions(["a", "b", large, "c"], may_be_empty=True))
    assert [portion.range.count for portion in found] == [2, 1, 1]


def test_inputs_are_taken_as_requests_are_made() -> None:
    taken = 0

    def inputs() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield "a"

    found = portions(inputs(), may_be_empty=True)
    next(found)
    assert taken == REQUEST_ITEMS + 1


def test_no_input_is_an_empty_request_or_none() -> None:
    none: list[str] = []
    assert [portion.inputs for portion in portions(none, may_be_empty=False)] == [[]]
    assert list(portions(none, may_be_empty=True)) == []


def test_a_wrong_input_is_left_for_the_engine_to_reject() -> None:
    wrong: list[object] = [None, 3, Image(None)]  # type: ignore[arg-type]
    assert [portion.inputs for portion in portions(wrong, may_be_empty=True)] == [wrong]
