"""Ranges of the inputs of a call, which is divided into several requests. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from staged_pool.stages.errors import InvalidInput, MediaUnavailable, ModelFailed, StagedPoolError


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
