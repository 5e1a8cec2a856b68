"""Row streams: the rows of a request as they come, for callers who stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio

from staged_pool.stages.offload import Offload
from staged_pool.stages.work import Plan

R = TypeVar("R")


class RowStream:
    """Rows of one request: its ticket adds them, and its caller takes them, both on the event loop.

    It is never full, so no stage waits for a slow caller. It holds at most the rows of one request, as the ticket of
    any other caller does.
    """

    __slots__ = ("_closed", "_event", "_fresh", "_plan", "_rows")

    def __init__(self) -> None:
        self._plan: Plan[object] | None = None
        self._rows: list[object] = []
        self._fresh: list[int] = []
        self._closed = False
        self._event = anyio.Event()

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
                self._rows = []
                return None
            self._event = anyio.Event()
            await self._event.wait()
        fresh, self._fresh = self._fresh, []
        plan, rows = self._plan, list(self._rows)  # a copy: later rows belong to the next call
        if plan is None or plan.finish_some is None:
            raise RuntimeError("this request has only a whole result: it cannot be streamed")
        finish_some = plan.finish_some
        return lambda: finish_some(rows, fresh)


async def give_rows(
    rows: RowStream,
    offload: Offload,
    write: Callable[[Sequence[int], Any], R],
    give: Callable[[R], Awaitable[None]],
) -> None:
    """Write results as their rows come, and give them to the caller.

    Args:
        rows: Rows of one request.
        offload: Runs `write`.
        write: Makes an output from indices in the request's result, and a result of these alone.
        give: Takes each output, one call at a time.
    """

    def written(finish: Callable[[], tuple[Sequence[int], object]]) -> R | None:
        places, result = finish()
        return write(places, result) if places else None

    while (finish := await rows.next()) is not None:
        given = await offload(written, finish)
        if given is not None:
            await give(given)
