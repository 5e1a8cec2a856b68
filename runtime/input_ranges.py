"""Ranges of the inputs of a call, which is divided into several requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from staged_pool.runtime.requests import Chat, Image, content_bytes
from staged_pool.stages.errors import InvalidInput, MediaUnavailable, ModelFailed, StagedPoolError

T = TypeVar("T")

REQUEST_ITEMS: Final = 256
"""Most inputs of one request of a long call. Fewer cost more for each, more make progress coarse."""

REQUEST_BYTES: Final = 2**20
"""Most bytes of the inputs of one request of a long call; a larger input is a request of its own."""


@dataclass(frozen=True, slots=True)
class InputRange:
    """Consecutive inputs of a call."""

    first: int
    count: int

    @property
    def last(self) -> int:
        """Index after the last input."""
        return self.first + self.count


def with_input_range(error: StagedPoolError, input_range: InputRange, total: int | None) -> StagedPoolError:
    """Name the inputs of a request in its error, and count `index` over the call.

    Args:
        error: Error of one request of a call.
        input_range: Inputs of that request.
        total: Number of inputs of the call. None: unknown.
    """
    if input_range.count == total:
        return error
    of_all = "" if total is None else f" of {total}"
    message = f"Inputs {input_range.first} to {input_range.last - 1}{of_all}: {error}"
    if isinstance(error, InvalidInput | ModelFailed | MediaUnavailable) and error.index is not None:
        error.index += input_range.first
        message += f" (input {error.index} of the call)"
    error.args = (message, *error.args[1:])
    return error


@dataclass(slots=True)
class Portion(Generic[T]):
    """Inputs of one request of a call."""

    first: int
    """Index of the first one in the call."""
    inputs: list[T] = field(default_factory=list)

    @property
    def range(self) -> InputRange:
        """The inputs as a range of those of the call."""
        return InputRange(self.first, len(self.inputs))


class Portions(Generic[T]):
    """Divides the inputs of a call between requests, one by one.

    Args:
        max_items: Most inputs of one request.
    """

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._open = Portion[T](0)
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        """True if the open portion has as many inputs as a request may have."""
        return len(self._open.inputs) == self._max_items

    def add(self, given: T) -> Portion[T] | None:
        """Add an input. Returns the portion before it, if it has no room there."""
        size = _bytes(given)
        has_room = not self.is_full and self._bytes + size <= REQUEST_BYTES
        before = self.cut() if self._open.inputs and not has_room else None
        self._open.inputs.append(given)
        self._bytes += size
        return before

    def cut(self) -> Portion[T]:
        """Return the open portion, and begin another one behind it."""
        portion, self._open, self._bytes = self._open, Portion(self._open.range.last), 0
        return portion


def portions(inputs: Iterable[T], *, may_be_empty: bool, max_items: int = REQUEST_ITEMS) -> Iterator[Portion[T]]:
    """Divide the inputs of a call between requests, as they come.

    Args:
        inputs: Inputs of the call.
        max_items: Most inputs of one request.
        may_be_empty: No input makes no request. False: it makes an empty one, which the engine rejects.
    """
    divided = Portions[T](max_items)
    for given in inputs:
        if (portion := divided.add(given)) is not None:
            yield portion
    if (last := divided.cut()).inputs or not (last.first or may_be_empty):
        yield last


def _bytes(given: object) -> int:
    """Return the approximate bytes of an input. Anything else counts nothing: the engine rejects it."""
    if isinstance(given, tuple | list):
        return sum(_bytes(part) for part in given) or len(given)
    with suppress(TypeError, AttributeError):
        return content_bytes(given) if isinstance(given, str | Image | Chat) else 0
    return 0
