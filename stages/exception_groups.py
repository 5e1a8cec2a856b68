"""Errors that task groups have wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def only_error(error: BaseException) -> BaseException:
    """The one error that a group holds, however deep; the group itself where it holds several."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def first_error(error: BaseException) -> BaseException:
    """The first of the errors that a group holds, however deep."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def single_errors() -> Iterator[None]:
    """Raise the only error of a group as itself: a host must see its own ValueError as a ValueError."""
    try:
        yield
    except BaseExceptionGroup as group:
        error = only_error(group)
        if error is group:
            raise
        try:
            raise error from error.__cause__
        finally:
            del error  # as in `Ticket.wait`
