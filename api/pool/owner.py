"""The owner of an engine in a thread of its own: it opens the engine at the first use, and ends it once."""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from difflib import get_close_matches
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar, get_args

from staged_pool.pool.calls import Call
from staged_pool.pool.engine_thread import CLOSED, Backend, EngineThread, result_of
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.encoding.absent_names import ABSENT_NAMES
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import open_engine
from staged_pool.runtime.own_names import OwnNames
from staged_pool.runtime.plugins.processor import Plugin
from staged_pool.runtime.settings import DAY_S
from staged_pool.runtime.statistics import EngineStatistics
from staged_pool.runtime.threads.openmp import spin_briefly
from staged_pool.stages.errors import ConfigError, EngineStopped

R = TypeVar("R")

_SETTINGS: Final = frozenset(field.name for field in dataclasses.fields(EngineConfig))


class EngineOwner(OwnNames):
    """Base of `Pool`, which has the arguments. All methods may be called from any thread, and block.

    The engine ends once: by `close`, when its owner is collected, or with the program.
    """

    _instead = ABSENT_NAMES

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig | None = None,
        *,
        backend: Backend = "asyncio",
        plugins: Sequence[Plugin] = (),
        **settings: Any,
    ) -> None:
        if backend not in get_args(Backend):
            raise ConfigError(f"backend={backend!r}: must be {' or '.join(map(repr, get_args(Backend)))}")
        self._backend = backend
        self._config = _config(model, settings)
        self._plugins = tuple(plugins)
        self._lock = threading.Lock()  # guards what follows
        self._thread: EngineThread | None = None
        self._closed = False

    def open(self) -> Self:
        """Load the model, unless it is loaded, and return the pool."""
        self._ready().engine()
        return self

    def close(self) -> None:
        """Finish the requests in flight, within `drain_timeout_s`, and free threads and memory.

        Later calls raise `EngineStopped`, and so does a long call of another thread that has requests to make yet.
        """
        self._close(drain=True)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(drain=kind is None)

    @property
    def config(self) -> EngineConfig:
        """Settings of the engine."""
        return self._config

    @property
    def card(self) -> ModelCard:
        """Description of the served model."""
        return self._ready().engine().card

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of the engine."""

        async def statistics(engine: Engine) -> EngineStatistics:
            return engine.statistics()

        return self.call(statistics)

    def submit(self, use: Callable[[Engine], Awaitable[R]]) -> Future[R]:
        """Start `use` with the engine in its event loop, and return a future.

        Cancelling the future cancels it. So `pool.submit(lambda engine: engine.embed("a text"))` waits for nothing but
        the model.
        """
        return self._ready().submit(use)

    def call(self, use: Callable[[Engine], Awaitable[R]]) -> R:
        """Run `use` with the engine, in its event loop, and return its result."""
        return result_of(self.submit(use))

    def _results(self, call: Call[Any, R]) -> list[R]:
        """Return the results of all requests of a call, in the order of the inputs."""
        return [result for _, result in call.results(self._submitting(call))]

    def _submitting(self, call: Call[Any, R]) -> Callable[[Callable[[Engine], Awaitable[R]]], Future[R]]:
        """Return the function that starts the requests of a call.

        A call that shows progress waits for the model first: the rate is that of its inputs.
        """
        thread = self._ready()
        if call.progress is not False:
            thread.engine()
        return thread.submit

    def _ready(self) -> EngineThread:
        """Return the thread of the engine, which may still load the model. After a failure it loads again."""
        if (thread := self._thread) is not None and not self._closed and not thread.failed:
            return thread
        with self._lock:
            if self._closed:
                raise EngineStopped(CLOSED)
            if self._thread is None or self._thread.failed:
                spin_briefly()
                self._thread = EngineThread(partial(open_engine, self._config, plugins=self._plugins), self._backend)
                weakref.finalize(self, self._thread.end)  # no method of the owner, which it would keep alive
            return self._thread

    def _close(self, *, drain: bool) -> None:
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._thread.end(drain=drain)


def _config(model: str | os.PathLike[str] | EngineConfig | None, settings: Mapping[str, Any]) -> EngineConfig:
    """Return the settings of an engine.

    Raises:
        ConfigError: A setting is unknown, or its value is out of its range.
    """
    for name in settings.keys() - _SETTINGS:
        close = get_close_matches(name, _SETTINGS, 1)
        raise ConfigError(f"{name}: is no setting of an engine{f', but {close[0]} is' if close else ''}")
    if isinstance(model, EngineConfig):
        return dataclasses.replace(model, **settings)
    # Callers of a pool wait: nobody else could do their work instead.
    return EngineConfig(**{"model": model and os.fspath(model), "target_delay_s": float(DAY_S), **settings})
