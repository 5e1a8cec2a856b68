"""The other processes of a server, as one of its fronts sees them."""

from __future__ import annotations

from typing import Literal, Protocol

import anyio


class Gate:
    """Gate in front of a listening socket: connections stay in its queue, for other processes, while it is closed."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.is_open = is_open
        self._opened = anyio.Event()

    def open(self) -> None:
        """Accept connections from now on."""
        self.is_open = True
        self._opened.set()

    def close(self) -> None:
        """Accept none until `open`."""
        self.is_open = False
        self._opened = anyio.Event()

    async def wait(self) -> None:
        """Wait until the gate is opened."""
        if not self.is_open:
            await self._opened.wait()


class Fleet(Protocol):
    """The server of several processes that a front belongs to."""

    gate: Gate
    """Gate of this front, which the server opens once requests can be answered."""

    async def report(self, name: Literal["metrics", "openmetrics", "stages"]) -> bytes:
        """Return the body of `/metrics` or `/stages`.

        Raises:
            EngineStopped: The supervisor does not answer.
        """
        ...
