"""Calls of many inputs: several requests, of which a window is in flight at once."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, Protocol, TypeVar

from staged_pool.pool.engine_thread import result_of
from staged_pool.runtime import arguments
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.patience import patiently
from staged_pool.runtime.input_ranges import REQUEST_ITEMS, InputRange, portions, with_input_range
from staged_pool.runtime.progress import Progress, reporting
from staged_pool.runtime.results import Usage
from staged_pool.stages.errors import StagedPoolError

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

WINDOW: Final = 8
"""Requests of one call that are in flight at once: enough that the device never waits for the caller's thread."""


class Ask(Protocol[T_contra, R_co]):
    """Asks an engine for the result of some inputs, within a number of seconds."""

    def __call__(self, engine: Engine, inputs: Sequence[T_contra], timeout_s: float, /) -> Awaitable[R_co]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T, R]):
    """A call of many inputs."""

    inputs: Iterable[T]
    total: int | None
    """Number of inputs. None: unknown."""
    ask: Ask[T, R]
    timeout_s: float
    """Limit for the last result, in seconds from the first request."""
    progress: Progress = False
    ordered: bool = True
    """Give results in the order of the inputs, not as they are done."""
    window: int = WINDOW
    portion_items: int = REQUEST_ITEMS
    """Most inputs of one request."""
    may_be_empty: bool = False
    """Make no request if there is no input. Otherwise the engine rejects an empty one."""

    def results(
        self, submit: Callable[[Callable[[Engine], Awaitable[R]]], Future[R]]
    ) -> Generator[tuple[InputRange, R], None, None]:
        """Yield the results of all requests. The caller's thread takes the inputs, as there is room for them.

        Closing the generator, or an interrupt, cancels the requests in flight.

        Raises:
            StagedPoolError: A request failed; the error names its inputs.
        """
        left = portions(self.inputs, may_be_empty=self.may_be_empty, max_items=self.portion_items)
        waiting = deque[_Request[R]]()
        ends_at = time.monotonic() + self.timeout_s
        with reporting(self.progress, self.total) as advance:
            try:
                while True:
                    while len(waiting) < self.window and (portion := next(left, None)) is not None:
                        patient = _Patient(self.ask, portion.inputs, ends_at - time.monotonic())
                        waiting.append(_Request(portion.range, submit(patient)))
                    if not waiting:
                        return
                    request = _done(waiting, ordered=self.ordered)
                    yield request.range, self._result(request, advance)
            finally:
                for request in waiting:
                    request.future.cancel()

    def _result(self, request: _Request[R], advance: Callable[[int], None]) -> R:
        try:
            result = result_of(request.future)
        except StagedPoolError as error:
            raise with_input_range(error, request.range, self.total) from error.__cause__
        advance(request.range.count)
        return result


def call_of(
    method: Callable[..., Awaitable[R]],
    inputs: Iterable[Any],
    options: Mapping[str, Any],
    *,
    progress: Progress,
    ordered: bool = True,
    may_be_empty: bool = False,
    items_each: int = 1,
) -> Call[Any, R]:
    """Make a call of many inputs.

    Args:
        method: Method of the engine.
        inputs: Inputs, taken one by one.
        options: Other arguments of the method. A `timeout_s` is that of the whole call.
        progress: See `Call`.
        ordered: See `Call`.
        may_be_empty: See `Call`.
        items_each: Items that an input makes, such as one for each of `candidate_labels`.
    """
    timeout_s = options.get("timeout_s", math.inf)
    arguments.time_limit(timeout_s)

    def ask(engine: Engine, some: Sequence[Any], left_s: float) -> Awaitable[R]:
        return method(engine, some, **{**options, "timeout_s": left_s})

    return Call(
        inputs=inputs,
        total=len(inputs) if isinstance(inputs, Sized) else None,
        ask=ask,
        timeout_s=timeout_s,
        progress=progress,
        ordered=ordered,
        may_be_empty=may_be_empty,
        portion_items=max(1, REQUEST_ITEMS // max(1, items_each)),
    )


class ResultStream(Iterator[tuple[int, T]], Generic[T]):
    """Iterator over results: the index of an input, and its result.

    Leaving a loop over it or its `with` block, or `close`, cancels the requests in flight. One thread may use it at a
    time.
    """

    def __init__(self, rows: Generator[tuple[int, T], None, Usage]) -> None:
        self._rows = rows
        self.usage: Usage | None = None
        """Usage of the call; None until the iterator is exhausted."""

    def __next__(self) -> tuple[int, T]:
        try:
            return next(self._rows)
        except StopIteration as end:
            self.usage = end.value or self.usage
            raise

    def close(self) -> None:
        """Cancel the requests in flight. The iterator gives nothing more."""
        self._rows.close()

    def __enter__(self) -> ResultStream[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Request(Generic[R]):
    range: InputRange
    future: Future[R]


@dataclass(frozen=True, slots=True)
class _Patient(Generic[T, R]):
    """One request, which waits for room in the engine."""

    ask: Ask[T, R]
    inputs: Sequence[T]
    timeout_s: float

    async def __call__(self, engine: Engine) -> R:
        return await patiently(partial(self.ask, engine, self.inputs), self.timeout_s)


def _done(waiting: deque[_Request[R]], *, ordered: bool) -> _Request[R]:
    """Take a request out of those in flight: the first, or one that is done."""
    if ordered:
        return waiting.popleft()
    done, _ = wait([request.future for request in waiting], return_when=FIRST_COMPLETED)
    request = next(request for request in waiting if request.future in done)
    waiting.remove(request)
    return request
