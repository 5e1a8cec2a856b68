"""The other processes of a server, as one of its fronts sees them."""

from __future__ import annotations

import enum
from typing import Literal, Protocol

from staged_pool.stages.changes import Changes


class _Phase(enum.Enum):
    LOADING = enum.auto()
    """The engine process has not welcomed this front: it can only answer that the models load."""
    OPENING = enum.auto()
    READY = enum.auto()


class Accepting:
    """Decides when a front accepts connections.

    While it does not, they stay in the queue of the listening socket, for any front that does. The decision is made of
    two facts at the moment that it is asked for: the phase of this front, and whether others serve.
    """

    def __init__(self) -> None:
        self._others_serve = True
        """True also until the supervisor has told: what held when this front was started may be long out of date."""
        self._phase = _Phase.LOADING
        self._changes = Changes()

    @property
    def is_on(self) -> bool:
        """True if this front accepts connections.

        Until the engine process welcomes it, it does if nobody else would. Its engines are open a moment later, and
        another front may be ready by then, so it waits for its own.
        """
        if self._phase is _Phase.LOADING:
            return not self._others_serve
        return self._phase is _Phase.READY

    async def until_on(self) -> None:
        """Wait until this front accepts connections."""
        await self._changes.until(lambda: self.is_on)

    def tell(self, *, others_serve: bool) -> None:
        """Note whether another front serves now."""
        self._others_serve = others_serve
        self._changes.note()

    def welcomed(self) -> None:
        """Note that the engine process has welcomed this front, whose engines are opened now."""
        self._to(_Phase.OPENING)

    def ready(self) -> None:
        """Note that this front can answer requests, from now on."""
        self._to(_Phase.READY)

    def _to(self, phase: _Phase) -> None:
        self._phase = phase
        self._changes.note()


class Fleet(Protocol):
    """The server of several processes that a front belongs to."""

    accepting: Accepting

    def ready(self) -> None:
        """Note that requests can be answered."""
        ...

    async def report(self, name: Literal["metrics", "openmetrics", "stages"]) -> bytes:
        """Return the body of `/metrics` or `/stages`.

        Raises:
            EngineStopped: The supervisor does not answer.
        """
        ...
