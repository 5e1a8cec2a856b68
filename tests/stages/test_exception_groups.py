"""Errors out of the groups that task groups make of them."""

from __future__ import annotations

import pytest

from staged_pool.stages.exception_groups import first_error, only_error, single_errors

ONE, OTHER = ValueError("one"), ValueError("other")
BOTH = ExceptionGroup("both", [ONE, OTHER])


def test_the_only_error_is_taken_out_however_deep() -> None:
    assert only_error(ExceptionGroup("outer", [ExceptionGroup("inner", [ONE])])) is ONE
    assert only_error(ExceptionGroup("outer", [BOTH])) is BOTH
    assert only_error(ONE) is ONE


def test_the_first_error_is_taken_out_of_several() -> None:
    assert first_error(ExceptionGroup("outer", [BOTH, OTHER])) is ONE
    assert first_error(ONE) is ONE


def test_an_error_that_is_alone_reaches_the_host_as_itself() -> None:
    with pytest.raises(ValueError, match="one"), single_errors():
        raise ExceptionGroup("outer", [ONE])
    with pytest.raises(ExceptionGroup) as raised, single_errors():
        raise BOTH
    assert raised.value is BOTH
