"""Where requests find the engine, or learn why there is none: the server answers before the model is loaded."""

from __future__ import annotations

from staged_pool.runtime.engine import Engine
from staged_pool.runtime.statistics import EngineStatistics
from staged_pool.stages.errors import EngineStopped

RETRY_AFTER_S = 5.0
"""For requests that come while the server starts or drains. Loading takes seconds, and so does a new process."""


class Lobby:
    """Opens once, when the engine is up, and closes once. Belongs to the event loop of the server."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._closed_for = "loading the model"
        self.leaving = False
        """The server drains: clients should not send on the connections that they have."""

    def open(self, engine: Engine) -> None:
        """Let requests in."""
        self._engine = engine
        if not self.leaving:
            self._closed_for = ""

    def close(self, reason: str) -> None:
        """Let no more requests in. Those that are inside are not touched."""
        self._closed_for = reason
        self.leaving = True

    @property
    def engine(self) -> Engine | None:
        """The engine, whether or not it takes requests; None until it is loaded."""
        return self._engine

    @property
    def not_ready(self) -> str:
        """Why requests are not taken; empty while they are."""
        if not self._closed_for and self._engine is not None:
            return self._engine.fault or ""
        return self._closed_for

    def enter(self) -> Engine:
        """The engine, for one request.

        Raises:
            EngineStopped: Requests are not taken; says why.
        """
        if self._engine is None or self.not_ready:
            message = f"The server takes no requests: {self.not_ready}"
            raise EngineStopped(message, retry_after_s=RETRY_AFTER_S)
        return self._engine

    def statistics(self) -> EngineStatistics | None:
        """The engine's snapshot; None until it is loaded."""
        return None if self._engine is None else self._engine.statistics()
