"""Row streams: the rows of a request as they come, for callers who stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import anyio

from staged_pool.stages.errors import StageFailed
from staged_pool.stages.offload import Offload
from staged_pool.stages.user_code import Panic, kind_of, user_code
from staged_pool.stages.work import Plan

R = TypeVar("R")

STREAM: Final = "stream"
"""Stage of results that are written and given to a caller who streams."""


class RowStream:
    """Rows of one request: its ticket adds them, and its caller takes them, both on the event loop.

    It is never full, so no stage waits for a slow caller. It holds at most the rows of one request, as the ticket of
    any other caller does.
    """

    __slots__ = ("_closed", "_event", "_fresh", "_plan", "_rows", "is_exhausted")

    def __init__(self) -> None:
        self._plan: Plan[object] | None = None
        self._rows: list[object] = []
        self._fresh: list[int] = []
        self._closed = False
        self._event = anyio.Event()
        self.is_exhausted = False
        """True once all rows are taken, and no more will come."""

    def expect(self, plan: Plan[object]) -> None:
        """Set the plan of the request."""
        self._plan = plan
        self._rows = [None] * len(plan.inputs)

    def add(self, index: int, row: object) -> None:
        """Add the complete row of an input."""
        self._rows[index] = row
        self._fresh.append(index)
        self._event.set()

    def close(self, *, keep: bool) -> None:
        """End the stream after the rows that are left; without `keep`, drop them."""
        self._closed = True
        if not keep:
            self._fresh = []
        self._event.set()

    async def next(self) -> Callable[[], tuple[Sequence[int], object]] | None:
        """Wait for new rows, and return a function that makes the results which they complete.

        The function may run in a thread; see `Plan.finish_some`. Call it before the next `next()`.

        Returns:
            The function; None at the end.
        """
        while not self._fresh:
            if self._closed:
                self._rows, self.is_exhausted = [], True
                return None
            self._event = anyio.Event()
            await self._event.wait()
        fresh, self._fresh = self._fresh, []
        plan, rows = self._plan, list(self._rows)  # a copy: later rows belong to the next call
        if plan is None or plan.finish_some is None:
            raise RuntimeError("this request has only a whole result: it cannot be streamed")
        finish_some = plan.finish_some
        return lambda: finish_some(rows, fresh)


@asynccontextmanager
async def given_rows(
    rows: RowStream,
    offload: Offload,
    write: Callable[[Sequence[int], Any], R],
    give: Callable[[R], Awaitable[None]],
) -> AsyncIterator[None]:
    """Give rows to their caller, beside a block that submits the request.

    Args:
        rows: Rows of one request.
        offload: Runs `write`.
        write: Makes an output from indices in the request's result, and a result of these alone.
        give: Takes each output, one call at a time.

    Raises:
        StageFailed: `write` or `give` let out an error that is no `Exception`, or a cancellation that nobody asked for.
        Exception: `write` or `give` raised it.
    """
    async with anyio.create_task_group() as giving:
        giving.start_soon(_give, rows, offload, write, give)
        yield
    if not rows.is_exhausted:
        raise StageFailed("The task that gives results was cancelled, and nobody had asked for it.", stage=STREAM)


async def _give(
    rows: RowStream,
    offload: Offload,
    write: Callable[[Sequence[int], Any], R],
    give: Callable[[R], Awaitable[None]],
) -> None:
    def written(finish: Callable[[], tuple[Sequence[int], object]]) -> R | None:
        places, result = finish()
        with user_code():
            return write(places, result) if places else None

    while (finish := await rows.next()) is not None:
        called = "writes"
        try:
            given = await offload(written, finish)
            called = "takes"
            if given is not None:
                async with user_code():
                    await give(given)
        except Panic as panic:
            message = f"The caller's function that {called} results failed: {kind_of(panic)}."
            raise StageFailed(message, stage=STREAM) from panic
