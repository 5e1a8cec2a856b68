"""Exception groups of task groups, unwrapped to the errors inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def only_error(error: BaseException) -> BaseException:
    """Return the only error of a nested group; a group of several stays."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def first_error(error: BaseException) -> BaseException:
    """Return the first error of a nested group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def single_errors() -> Iterator[None]:
    """Raise the only error of a group as itself: a host sees its own ValueError as a ValueError."""
    try:
        yield
    except BaseExceptionGroup as group:
        error = only_error(group)
        if error is group:
            raise
        try:
            raise error from error.__cause__
        finally:
            del error  # break the cycle of the error, its traceback and this frame
