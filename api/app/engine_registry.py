"""Registry of loaded engines, which also has the reason while requests are not accepted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, TypeVar

from staged_pool.api.app.engine_metrics import engine_families
from staged_pool.api.app.engine_totals import EngineTotals
from staged_pool.api.app.load_report import ServerLoad
from staged_pool.api.wire.json_bounds import BodyLimits
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.load_progress import LoadStatus, load_progress, reporting_loads
from staged_pool.runtime.memory.budget import ByteAccount
from staged_pool.runtime.memory.governor import UNLIMITED_BYTES
from staged_pool.runtime.pipelines.pipeline import Pipeline
from staged_pool.runtime.pipelines.statistics import PipelineStatistics
from staged_pool.runtime.statistics import EngineStatistics
from staged_pool.stages.errors import EngineStopped, UnknownModel, shortened

RETRY_AFTER_S = 5.0
"""Seconds until a retry of a request that arrives while the server starts or drains."""


_LOADING: Final = "loading the model"
_NONE: Final = "one model makes room for another"


E = TypeVar("E")


class EngineRegistry:
    """Engines of one server: opened once, when they are loaded, and closed once. They may change meanwhile.

    A handler submits to an engine in the same step of the event loop in which it gets the engine here, so one that has
    left gets no further request. The registry belongs to the event loop of the server.
    """

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}
        self.engines: Sequence[Engine] = ()
        """All engines, including those that accept no requests; empty until they are loaded."""
        self.limits = _limits([EngineConfig()])
        """Largest limits of all models: the model of a request is not known before its body is read."""
        self.pipelines: Mapping[str, Pipeline] = {}
        """Pipelines on these engines, by name; empty until they are loaded."""
        self.totals = EngineTotals(engine_families)
        """Counters of engines that others have replaced."""
        self._closed_for = _LOADING
        self._progress = load_progress()
        self._closes_soon_for = ""
        self.leaving = False
        """True once the server drains: clients should open new connections elsewhere."""
        self.closes_connections = False
        """True once each answer closes its connection: in the drain, and at the end of its lead."""

    @property
    def answers(self) -> ByteAccount:
        """Account of the memory of answers, which the engines share; without a limit while there is no engine."""
        return self.engines[0].memory.budget.answers if self.engines else ByteAccount(UNLIMITED_BYTES)

    @property
    def outcomes(self) -> ByteAccount:
        """Account of the memory of the outcomes of pipelines; see `answers`."""
        return self.engines[0].memory.budget.outcomes if self.engines else ByteAccount(UNLIMITED_BYTES)

    def open(self, *engines: Engine, pipelines: Mapping[str, Pipeline] | None = None) -> None:
        """Accept requests from now on, for these engines, at least one. The first one is the default."""
        self.pipelines = pipelines or {}
        self._set({engine.card.name: engine for engine in engines})
        if not self.leaving:
            self._closed_for = ""

    @asynccontextmanager
    async def loading(self, opening: AbstractAsyncContextManager[E]) -> AsyncIterator[E]:
        """Open engines for a block, and see how far their loads are."""
        with reporting_loads(self._progress):
            async with opening as engines:
                yield engines

    def follow_load(self, status: LoadStatus | None) -> None:
        """Take over the state of the loads of another process."""
        self._progress.status = status

    @property
    def load_status(self) -> LoadStatus | None:
        """The state of the first load; None if it is not known, or afterwards."""
        return self._progress.status if self._closed_for == _LOADING else None

    def announce_close(self, reason: str) -> None:
        """Let `unready` give this reason from now on; requests are accepted until `close`."""
        self._closes_soon_for = reason

    def put(self, engine: Engine) -> None:
        """Send requests from now on to this engine. It takes the place of the one of its name, if there is one."""
        replaced = self._engines.get(engine.card.name)
        if replaced is not None:
            self.totals.replaced(replaced)
        self._set({**self._engines, engine.card.name: engine})

    def remove(self, engine: Engine) -> None:
        """Send no request to this engine from now on."""
        self._set({name: each for name, each in self._engines.items() if each is not engine})

    def ended(self, engine: Engine) -> None:
        """Note that an engine has ended which gets no requests any more."""
        self.totals.ended(engine)
        if engine.card.name not in self._engines:
            self.totals.forget(engine.card.name)

    def _set(self, engines: dict[str, Engine]) -> None:
        self._engines = engines
        self.engines = tuple(engines.values())
        if engines:
            self.limits = _limits([engine.config for engine in self.engines])

    def close(self, reason: str) -> None:
        """Reject new requests from now on, with this reason; requests in flight continue."""
        self._closed_for = reason
        self.leaving = self.closes_connections = True

    @property
    def not_ready(self) -> str:
        """Reason why requests are not accepted; empty while they are. With several models it names the model."""
        return self.obstruction()

    def obstruction(self, name: str | None = None) -> str:
        """Return the reason as in `not_ready`, for one model, or for all models with None."""
        if self._closed_for or not self._engines:
            return self._closure
        return self._first(name, lambda engine: engine.fault)

    @property
    def _closure(self) -> str:
        """Reason for taking no requests for any model."""
        status = self.load_status
        return self._closed_for or _NONE if status is None else f"{_LOADING}: {status.sentence}"

    def _choose(self, engine: Engine) -> Engine:
        """Return the engine that takes the next request of a model: this one, unless others serve it, too."""
        return engine

    def _comes_back(self, engine: Engine) -> bool:
        """Tell if an engine with a fault is being started anew: requests then wait for it, though not for long."""
        return engine.is_away

    def unready(self, name: str | None = None) -> str:
        """Return the reason why a gateway should send requests elsewhere; empty if it should not.

        Beside `obstruction`, it tells that the server is about to drain, and that a forward seems to hang. Requests
        that come all the same are accepted.
        """
        return self.obstruction(name) or self._closes_soon_for or self._first(name, lambda engine: engine.stall)

    def _first(self, name: str | None, reason_of: Callable[[Engine], str | None]) -> str:
        several = len(self._engines) > 1 and name is None
        for each, engine in self._engines.items():
            if name in (None, each) and (reason := reason_of(self._choose(engine))):
                return f"{each}: {reason}" if several else reason
        return ""

    def enter(self, name: str | None = None) -> Engine:
        """Return the engine of a model, for one request.

        Args:
            name: Name of the model in the request. None and "": the first engine.

        Raises:
            EngineStopped: Requests are not accepted; the message has the reason.
            UnknownModel: No model has this name.
        """
        if self._closed_for or not self._engines:
            raise EngineStopped(f"The server accepts no requests: {self._closure}", retry_after_s=RETRY_AFTER_S)
        engine = self._engines.get(name) if name else next(iter(self._engines.values()))
        if engine is None:
            raise self.unknown(name or "")
        engine = self._choose(engine)
        if (fault := engine.fault) and not self._comes_back(engine):
            raise EngineStopped(f"The server accepts no requests: {fault}", retry_after_s=RETRY_AFTER_S)
        return engine

    def enter_pipeline(self, name: str) -> Pipeline:
        """Return a pipeline, for one request.

        Raises:
            EngineStopped: See `enter`.
        """
        if self._closed_for:
            self.enter()
        return self.pipelines[name]

    def listed(self, name: str | None) -> Sequence[Engine]:
        """Return the engine of the named model, or all engines if the request names none.

        Raises:
            EngineStopped: See `enter`.
            UnknownModel: See `enter`.
        """
        engine = self.enter(name)
        return self.engines if name is None else (engine,)

    def knows(self, name: str) -> bool:
        """Tell if a model may have this name: any name may exist until the models are loaded."""
        return name in self._engines or not self._engines

    def unknown(self, name: str) -> UnknownModel:
        """Return the error for a model that is not served."""
        message = f"The model `{shortened(name)}` does not exist. Served: {', '.join(self._engines)}"
        return UnknownModel(message, param="model")

    def statistics(self) -> Mapping[str, EngineStatistics]:
        """Return a snapshot of each engine by its model's name; empty until they are loaded."""
        return {name: engine.statistics() for name, engine in self._engines.items()}

    def load(self) -> ServerLoad:
        """Return the load of all engines; none before they are loaded."""
        return ServerLoad.of({name: engine.load() for name, engine in self._engines.items()})

    def pipeline_statistics(self) -> Mapping[str, PipelineStatistics]:
        """Return a snapshot of each pipeline by its name."""
        return {name: pipeline.statistics() for name, pipeline in self.pipelines.items()}


def _limits(configs: Sequence[EngineConfig]) -> BodyLimits:
    return BodyLimits(
        items=max(config.max_request_items for config in configs),
        tokens=max(config.max_tokens for config in configs),
    )
