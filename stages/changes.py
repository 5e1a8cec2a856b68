"""Changes: tasks that wait until a condition on shared state holds."""

from __future__ import annotations

from collections.abc import Callable

import anyio


class Changes:
    """Wakes tasks that wait for a condition on some state, at each change of it.

    No wake-up is lost. The event of a change is set before another one takes its place, and a woken task looks at its
    condition again. One event loop makes and uses it.
    """

    def __init__(self) -> None:
        self._next = anyio.Event()

    def note(self) -> None:
        """Let all waiters look at their conditions again. Call it after each change of the state."""
        noted, self._next = self._next, anyio.Event()
        noted.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds. It holds when this returns, and changes nothing if it does already."""
        while not holds():
            await self._next.wait()
