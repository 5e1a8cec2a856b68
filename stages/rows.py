"""The rows of one request as they come, for a caller who does not want to wait for the last of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio

from staged_pool.stages.offload import Offload
from staged_pool.stages.work import Plan

R = TypeVar("R")


class RowStream:
    """Filled by the request's ticket, emptied by its caller; both on the event loop's thread.

    It is never full, so that no stage waits for a caller who is slow: it holds the rows of one request, which is what
    the ticket of a caller who wants them all at once holds too.
    """

    __slots__ = ("_closed", "_event", "_fresh", "_plan", "_rows")

    def __init__(self) -> None:
        self._plan: Plan[object] | None = None
        self._rows: list[object] = []
        self._fresh: list[int] = []
        self._closed = False
        self._event = anyio.Event()

    def expect(self, plan: Plan[object]) -> None:
        """Say how the request is done."""
        self._plan = plan
        self._rows = [None] * len(plan.inputs)

    def add(self, index: int, row: object) -> None:
        """The row of an input is there, whole."""
        self._rows[index] = row
        self._fresh.append(index)
        self._event.set()

    def close(self, *, keep: bool) -> None:
        """No row will come any more; without `keep`, none that is there is of use either."""
        self._closed = True
        if not keep:
            self._fresh = []
        self._event.set()

    async def next(self) -> Callable[[], tuple[Sequence[int], object]] | None:
        """Wait for rows; a function that makes of them what they complete (see `Plan.finish_some`). None at the end.

        The function may run in a thread; it is to be called before rows are waited for again.
        """
        while not self._fresh:
            if self._closed:
                self._rows = []
                return None
            self._event = anyio.Event()
            await self._event.wait()
        fresh, self._fresh = self._fresh, []
        plan, rows = self._plan, list(self._rows)  # as of now: later rows are fresh the next time
        if plan is None or plan.finish_some is None:
            raise RuntimeError("the results of this request are not to be had one by one")
        finish_some = plan.finish_some
        return lambda: finish_some(rows, fresh)


async def give_rows(
    rows: RowStream,
    offload: Offload,
    write: Callable[[Sequence[int], Any], R],
    give: Callable[[R], Awaitable[None]],
) -> None:
    """Give what the rows make as they come, until they end.

    Args:
        rows: Those of one request.
        offload: Runs `write`.
        write: Makes what is given out of places in the request's result, and a result of these alone.
        give: Takes it; one call at a time.
    """

    def written(finish: Callable[[], tuple[Sequence[int], object]]) -> R | None:
        places, result = finish()
        return write(places, result) if places else None

    while (finish := await rows.next()) is not None:
        given = await offload(written, finish)
        if given is not None:
            await give(given)
