"""Errors of requests: the caller's names for fields, and copies without tracebacks."""

from __future__ import annotations

import pytest

from staged_pool.stages.errors import (
    ECHO_LIMIT,
    InvalidInput,
    InvalidSetting,
    ModelFailed,
    Overloaded,
    Words,
    detached,
    shortened,
)


def test_a_message_names_fields_as_the_caller_does() -> None:
    error = InvalidInput("Send $top_n of at most 3; $top_nothing is not a field", param="top_n")
    assert str(error) == "Send top_n of at most 3; $top_nothing is not a field"
    assert error.in_words(Words({"top_n": "top_k"})) == (
        "Send top_k of at most 3; $top_nothing is not a field",
        "top_k",
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InvalidInput("too long", param="input", index=2), ("texts[2]: too long", "texts")),
        (InvalidInput("texts[2]: too long", param="input", index=2), ("texts[2]: too long", "texts")),
        (InvalidInput("too long", param="input"), ("too long", "texts")),
        (InvalidInput("too many", param="top_n", index=2), ("too many", "top_n")),
        (InvalidInput("too long"), ("too long", None)),
    ],
)
def test_the_place_of_an_input_stands_before_the_message_once(
    error: InvalidInput, said: tuple[str, str | None]
) -> None:
    words = Words({"input": "texts"}, place=lambda field, index: f"{field}[{index}]")
    assert error.in_words(words) == said


def test_a_longer_message_keeps_class_field_and_place() -> None:
    longer = InvalidSetting("must be above 0", index=1).with_prefix("row 3: ", param="$dimensions")
    assert type(longer) is InvalidSetting
    assert (str(longer), longer.param, longer.index) == ("row 3: must be above 0", "$dimensions", 1)


def test_a_caller_gets_a_copy_without_frames() -> None:
    with pytest.raises(Overloaded) as raised:
        raise Overloaded("too much", retry_after_s=2.5)
    assert raised.value.__traceback__ is not None
    twin = detached(raised.value)
    assert isinstance(twin, Overloaded)
    assert (str(twin), twin.retry_after_s, twin.__traceback__) == ("too much", 2.5, None)
    indexed = ModelFailed("NaN", index=1)
    other = detached(indexed)
    assert isinstance(other, ModelFailed)
    other.index = 7
    assert indexed.index == 1


def test_a_value_in_a_message_is_one_short_line() -> None:
    assert shortened("a\nb\x00c") == "a b c"
    assert len(shortened("x" * 1000)) == ECHO_LIMIT
    assert shortened("x" * ECHO_LIMIT) == "x" * ECHO_LIMIT
