"""Values are counted as a parser would, wherever a slice ends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.api.wire import json_bounds
from staged_pool.api.wire.forms import read_form
from staged_pool.api.wire.json_bounds import MAX_DIGITS, BodyLimits, check_bounds
from staged_pool.stages.errors import InvalidInput, TooLarge

SOME = BodyLimits(items=1, tokens=1000)
"""Values and numbers that are few beside the bodies here."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text('a,:[{"\\]}\n 1é'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('a,"\\'), inner),
    max_leaves=30,
)


def commas_and_marks(value: Any) -> tuple[int, int]:
    """Commas behind a digit; and all other commas, colons and opening brackets."""
    if isinstance(value, dict):
        inner = list(value.values())
        own = 1 + len(inner)
    elif isinstance(value, list):
        inner, own = value, 1
    else:
        return 0, 0
    behind_digits = sum(type(each) is int for each in inner[:-1])
    numbers, marks = zip(*map(commas_and_marks, inner), strict=True) if inner else ((), ())
    return behind_digits + sum(numbers), own + max(len(inner) - 1, 0) - behind_digits + sum(marks)


def is_accepted(body: bytes, values: int, numbers: int) -> bool:
    limits = _Exactly(values, numbers)
    try:
        check_bounds(body, limits)
    except TooLarge:
        return False
    return True


class _Exactly(BodyLimits):
    """Limits of values as they are given."""

    def __init__(self, values: int, numbers: int) -> None:
        super().__init__(items=values, tokens=numbers)

    @property
    def values(self) -> int:
        return self.items


@pytest.mark.parametrize("slice_bytes", [1, 2, 3, 7, 64])
@given(value=JSON, ascii_only=st.booleans())
def test_marks_are_those_outside_texts(slice_bytes: int, value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, separators=(",", ":"), ensure_ascii=ascii_only).encode()
    numbers, marks = commas_and_marks(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "SLICE", slice_bytes)
        assert is_accepted(body, marks, numbers)
        if marks:
            assert not is_accepted(body, marks - 1, numbers)
        if numbers:
            assert not is_accepted(body, marks, numbers - 1)


@pytest.mark.parametrize("text", [",", "[", '{"a":1},', "\\", '\\"', '\\\\",', "1,"])
def test_a_text_may_be_made_of_anything(text: str) -> None:
    check_bounds(json.dumps({"input": text * 300_000}).encode(), SOME)


@pytest.mark.parametrize(
    "unit", ["[]", "{}", '""', '"a"', "null", "[1]", '{"a":1}', '["a","b"]', '{"role":"","content":""}', "1.5", "1"]
)
def test_more_values_than_a_request_has_are_not_decoded(unit: str) -> None:
    body = b'{"input":[' + b",".join([unit.encode()] * 100_000) + b"]}"
    with pytest.raises(TooLarge, match=r"The body has more than \d+ (lists, objects, fields and texts|numbers); send "):
        check_bounds(body, SOME)


def test_a_number_of_many_digits_is_not_decoded() -> None:
    whole, fraction = b"1" * (MAX_DIGITS + 1), b"0." + b"1" * (MAX_DIGITS + 1)
    ahead = b'{"text":"' + b"1" * 100_000 + b'","input":['
    for number in (whole, fraction):
        with pytest.raises(InvalidInput, match="The body has a number of more than 64 digits"):
            check_bounds(ahead + number + b"]}", SOME)
    check_bounds(ahead + b"1" * MAX_DIGITS + b"]}", SOME)


def test_a_number_across_the_end_of_a_slice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bounds, "SLICE", 50)
    with pytest.raises(InvalidInput, match="digits"):
        check_bounds(b" " * 2000 + b"[" + b"1" * 120 + b"]", SOME)


def test_a_part_of_a_form_is_looked_at_as_a_body_is() -> None:
    head = b'--b\r\ncontent-disposition: form-data; name="input"\r\n\r\n'
    body = head + b"[" + b",".join([b"[]"] * 100_000) + b"]\r\n--b--\r\n"
    with pytest.raises(TooLarge, match="lists, objects, fields and texts"):
        read_form(body, b"b", SOME)
