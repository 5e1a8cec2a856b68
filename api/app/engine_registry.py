"""Where requests find the engine, or learn why there is none: the server answers before the model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.statistics import EngineStatistics
from staged_pool.stages.errors import EngineStopped, UnknownModel, shortened

RETRY_AFTER_S = 5.0
"""For requests that come while the server starts or drains. Loading takes seconds, and so does a new process."""


class EngineRegistry:
    """Opens once, when the engines are up, and closes once. Belongs to the event loop of the server."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}
        self._closed_for = "loading the model"
        self.leaving = False
        """The server drains: clients should not send on the connections that they have."""

    def open(self, *engines: Engine) -> None:
        """Let requests in, to at least one engine. The first is the one that requests without a model's name go to,
        if it can do their task."""
        self._engines = {engine.card.name: engine for engine in engines}
        if not self.leaving:
            self._closed_for = ""

    def close(self, reason: str) -> None:
        """Let no more requests in. Those that are inside are not touched."""
        self._closed_for = reason
        self.leaving = True

    @property
    def engines(self) -> Sequence[Engine]:
        """Whether or not they take requests; empty until they are loaded."""
        return tuple(self._engines.values())

    @property
    def not_ready(self) -> str:
        """Why requests are not taken; empty while they are. With several models, one that takes none is named."""
        return self.obstruction()

    def obstruction(self, name: str | None = None) -> str:
        """As `not_ready`, of the model of this name alone; None: of all."""
        if self._closed_for:
            return self._closed_for
        several = len(self._engines) > 1 and name is None
        for each, engine in self._engines.items():
            if name in (None, each) and (fault := engine.fault):
                return f"{each}: {fault}" if several else fault
        return ""

    def enter(self, name: str | None = None) -> Engine:
        """The engine of a model, for one request.

        Args:
            name: As the request has it. None and "": the first engine.

        Raises:
            EngineStopped: Requests are not taken; says why.
            UnknownModel: No model has this name.
        """
        if self._closed_for:
            raise EngineStopped(f"The server takes no requests: {self._closed_for}", retry_after_s=RETRY_AFTER_S)
        engine = self._engines.get(name) if name else next(iter(self._engines.values()))
        if engine is None:
            raise self.unknown(name or "")
        if fault := engine.fault:
            raise EngineStopped(f"The server takes no requests: {fault}", retry_after_s=RETRY_AFTER_S)
        return engine

    def listed(self, name: str | None) -> Sequence[Engine]:
        """The engines that a request asks about: the one of the model that it names, or all.

        Raises:
            EngineStopped: See `enter`.
            UnknownModel: See `enter`.
        """
        engine = self.enter(name)
        return self.engines if name is None else (engine,)

    def knows(self, name: str) -> bool:
        """A model has this name, or may have it: which there are is not known while they load."""
        return name in self._engines or not self._engines

    def unknown(self, name: str) -> UnknownModel:
        """The rejection of a request for a model that is not served."""
        message = f"The model `{shortened(name)}` does not exist. Served: {', '.join(self._engines)}"
        return UnknownModel(message, param="model")

    def statistics(self) -> Mapping[str, EngineStatistics]:
        """A snapshot of each engine, by its model's name; empty until they are loaded."""
        return {name: engine.statistics() for name, engine in self._engines.items()}
