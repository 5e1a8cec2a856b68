"""A front's end of its control line: the orders that it takes, and the reports that it sends."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Final

import anyio

from staged_pool.api.app.fleet import Accepting
from staged_pool.api.fleet.control import Ask, Beat, Control, Drain, Listening, Loading, Lost, Others, Ready, Tell
from staged_pool.api.fleet.snapshot import Snapshot
from staged_pool.runtime.load_progress import LoadStatus
from staged_pool.stages.errors import EngineStopped
from staged_pool.stages.link import Stream

ANSWER_S: Final = 2.0
"""Longest wait for a report of the supervisor, in seconds."""


class FrontControl:
    """Takes the orders of the supervisor, and tells it the state of this front.

    Args:
        stream: Control line to the supervisor.
        follow_load: Takes the state of the load in the engine process.
        snapshot: Takes a snapshot of this process.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        follow_load: Callable[[LoadStatus | None], object],
        snapshot: Callable[[], Snapshot],
    ) -> None:
        self.accepting = Accepting()
        """Decides when this front accepts connections."""
        self.drain = anyio.Event()
        """Set once this front has to drain."""
        self._snapshot = snapshot
        self._numbers = count(1)
        self._asked: dict[int, tuple[anyio.Event, list[bytes]]] = {}
        self._control = Control(
            stream,
            {
                Drain: lambda _: self.drain.set(),
                Others: lambda others: self.accepting.tell(others_serve=others.serve),
                Loading: lambda loading: follow_load(loading.status),
                Tell: self._told,
            },
        )
        self.run = self._control.run
        # The answer comes behind all earlier orders, so it is not out of date when it is read.
        self._control.post(Listening())

    def ready(self) -> None:
        """Accept connections from now on, and tell the supervisor so."""
        self.accepting.ready()
        self._control.post(Ready())

    def beat(self) -> None:
        """Tell the supervisor that this process is alive, and its work so far."""
        self._control.post_report(Beat(self._snapshot()))

    def lost(self, number: int) -> None:
        """Tell the supervisor that the line of a number has ended: this front needs another one."""
        self._control.post(Lost(number))

    def close(self) -> None:
        """Tell the supervisor all that this process has done, and end the control line."""
        self.beat()
        self._control.close()

    async def report(self, name: str) -> bytes:
        """Return a report on all processes.

        Args:
            name: `metrics`, `openmetrics` or `stages`.

        Raises:
            EngineStopped: The supervisor does not answer.
        """
        number, answer = next(self._numbers), (anyio.Event(), list[bytes]())
        self._asked[number] = answer
        self.beat()
        self._control.post(Ask(number, name))
        try:
            with anyio.move_on_after(ANSWER_S):
                await answer[0].wait()
        finally:
            del self._asked[number]
        if not answer[1]:
            raise EngineStopped("The supervisor of this server does not answer.")
        return answer[1][0]

    def _told(self, tell: Tell) -> None:
        if (answer := self._asked.get(tell.number)) is not None:
            answer[1].append(tell.body)
            answer[0].set()
