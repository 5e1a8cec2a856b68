"""Calls of many inputs: several requests, of which a window is in flight at once."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Final, Generic, Protocol, TypeVar

from staged_pool.pool.engine_thread import result_of
from staged_pool.runtime import arguments
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.patience import patiently
from staged_pool.runtime.input_ranges import REQUEST_ITEMS, InputRange, Portion, Portions, with_input_range
from staged_pool.runtime.progress import Progress, reporting
from staged_pool.runtime.results import Usage
from staged_pool.stages.errors import StagedPoolError, StageFailed
from staged_pool.stages.user_code import Panic, kind_of, user_code

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

WINDOW: Final = 8
"""Requests of one call that are in flight at once: enough that the device never waits for the caller's thread."""

SOURCE: Final = "source"
"""Stage of inputs that are taken from the caller."""


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
    is_stream: bool = False
    """Results are read one by one: inputs go at once where nothing is in flight, however few they are."""
    window: int = WINDOW
    portion_items: int = REQUEST_ITEMS
    """Most inputs of one request."""
    may_be_empty: bool = False
    """Make no request if there is no input. Otherwise the engine rejects an empty one."""

    def results(
        self, submit: Callable[[Callable[[Engine], Awaitable[R]]], Future[R]]
    ) -> Generator[tuple[InputRange, R], None, None]:
        """Yield the results of all requests, as they are done.

        The caller's thread takes the inputs, one by one, as there is room for them. Closing the generator, or an
        interrupt, cancels the requests in flight. An error of the iterator of the inputs comes as it is; in a stream it
        comes behind the results of the inputs before it.

        Raises:
            StagedPoolError: A request failed; the error names its inputs. Or the iterator let out an
                error that is no `Exception`, such as `SystemExit`.
        """
        source, flight = _Source(self), _Flight[R](ordered=self.ordered)
        ends_at = time.monotonic() + self.timeout_s
        with reporting(self.progress, self.total) as advance:
            try:
                while True:
                    takes_more = not source.has_ended and len(flight) < self.window
                    if (done := flight.take(wait=not takes_more)) is not None:
                        yield done[0], self._result(*done, advance)
                    elif not takes_more:
                        break
                    else:
                        for portion in source.next(flight):
                            patient = _Patient(self.ask, portion.inputs, ends_at - time.monotonic())
                            flight.add(portion.range, submit(patient))
                source.raise_error()
            finally:
                flight.cancel()

    def _result(self, input_range: InputRange, future: Future[R], advance: Callable[[int], None]) -> R:
        try:
            result = result_of(future)
        except StagedPoolError as error:
            raise with_input_range(error, input_range, self.total) from error.__cause__
        try:
            with user_code():
                advance(input_range.count)
        except Panic as panic:
            raise StageFailed(f"The function of the progress failed: {kind_of(panic)}.", stage=SOURCE) from panic
        return result


def call_of(
    method: Callable[..., Awaitable[R]],
    inputs: Iterable[Any],
    options: Mapping[str, Any],
    *,
    progress: Progress,
    ordered: bool = True,
    is_stream: bool = False,
    items_each: int = 1,
    may_be_empty: bool = False,
) -> Call[Any, R]:
    """Make a call of many inputs.

    Args:
        method: Method of the engine.
        inputs: Inputs, taken one by one.
        options: Other arguments of the method. A `timeout_s` is that of the whole call.
        progress: See `Call`.
        ordered: See `Call`.
        is_stream: See `Call`.
        items_each: Items that an input makes, such as one for each of `candidate_labels`.
        may_be_empty: See `Call`. A stream always may.
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
        is_stream=is_stream,
        may_be_empty=is_stream or may_be_empty,
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
class _Patient(Generic[T, R]):
    """One request, which waits for room in the engine."""

    ask: Ask[T, R]
    inputs: Sequence[T]
    timeout_s: float

    async def __call__(self, engine: Engine) -> R:
        return await patiently(partial(self.ask, engine, self.inputs), self.timeout_s)


class _Source(Generic[T]):
    """The inputs of a call, divided between requests. Its iterator is code of the caller."""

    def __init__(self, call: Call[T, Any]) -> None:
        self._call = call
        self._inputs: Iterator[T] | None = None
        self._portions = Portions[T](call.portion_items)
        self._error: Exception | None = None
        self.has_ended = False

    def next(self, flight: _Flight[Any]) -> Iterator[Portion[T]]:
        """Take one more input, and yield the portions that are complete.

        A stream does not wait for more inputs once all requests in flight are done.
        """
        try:
            with user_code():
                if self._inputs is None:
                    self._inputs = iter(self._call.inputs)
                for given in islice(self._inputs, 1):
                    before = self._portions.add(given)
                    break
                else:
                    self.has_ended, before = True, None
        except Exception as error:  # noqa: BLE001  # the caller's own, which comes back to it
            if not self._call.is_stream:
                raise _own_error(error) from error.__cause__
            self._error, self.has_ended, before = _own_error(error), True, None
        if before is not None:
            yield before
        if self.has_ended:
            if (last := self._portions.cut()).inputs or not (last.first or self._call.may_be_empty):
                yield last
        elif self._portions.is_full or (self._call.is_stream and flight.is_idle):
            yield self._portions.cut()

    def raise_error(self) -> None:
        """Raise the error by which the iterator ended, if there is one."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # break the cycle of the error, its traceback and this frame


def _own_error(error: Exception) -> Exception:
    """Return the error for the caller whose iterator has failed: its own, as it is."""
    if not isinstance(error, Panic):
        return error
    failure = StageFailed(f"The iterator of the inputs failed: {kind_of(error)}.", stage=SOURCE)
    failure.__cause__ = error
    return failure


class _Flight(Generic[R]):
    """The requests in flight of a call, those that are done and not taken included."""

    def __init__(self, *, ordered: bool) -> None:
        self._ordered = ordered
        self._ranges: dict[Future[R], InputRange] = {}
        self._done = SimpleQueue[Future[R]]()

    def __len__(self) -> int:
        return len(self._ranges)

    @property
    def is_idle(self) -> bool:
        """True if all of them are done."""
        return all(future.done() for future in self._ranges)

    def add(self, input_range: InputRange, future: Future[R]) -> None:
        """Add a request."""
        self._ranges[future] = input_range
        if not self._ordered:
            future.add_done_callback(self._done.put)

    def take(self, *, wait: bool) -> tuple[InputRange, Future[R]] | None:
        """Take the first request, or, without an order, the next one that is done.

        Args:
            wait: Wait until one is done; in order, the result must be waited for. False: None if there is none yet.
        """
        if not self._ranges:
            return None
        future = next(iter(self._ranges))
        if self._ordered:
            if not wait and not future.done():
                return None
        else:
            try:
                future = self._done.get(block=wait)
            except Empty:
                return None
        return self._ranges.pop(future), future

    def cancel(self) -> None:
        """Cancel all requests."""
        for future in self._ranges:
            future.cancel()
