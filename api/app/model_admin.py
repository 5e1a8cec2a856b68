"""Models that operators load, switch and unload while the server serves."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from staged_pool.api import status
from staged_pool.api.app.engine_registry import RETRY_AFTER_S, EngineRegistry
from staged_pool.api.app.model_records import ModelRecord, problem_of
from staged_pool.api.process_memory import collect_garbage
from staged_pool.api.status import HttpError
from staged_pool.api.wire.model_admin import LoadBody
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.engine_group import EngineGroup
from staged_pool.runtime.engine.weight_memory import weights_bytes
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.settings import show_bytes
from staged_pool.stages.errors import EngineStopped
from staged_pool.stages.log import get_logger

LOADING_FACTOR: Final = 1.5
"""Memory that a load takes at most, in bytes for each byte of weights.

A CLIP (ViT-B/32, float32) took 1.8 GB while its layers were prepacked, and 1.2 GB after that (`python -m perf memory`).
"""

MOST_FAILED: Final = 32
"""Most failed loads that are remembered."""

Users: TypeAlias = Callable[[Engine], str | None]
"""Returns what still needs an engine, in words; None if nothing does."""

Watch: TypeAlias = Callable[[Engine], Coroutine[Any, Any, None]]
"""Follows an engine until it ends."""

log = get_logger("staged_pool.models")


class ModelAdmin:
    """Loads, switches and unloads the models of one server, one after the other.

    Each operation is a task of the server: it goes on if the client that has asked for it leaves. Whatever an operation
    fails of, the models that serve go on.

    Args:
        registry: The engines that get requests.
        base: Settings of what a request does not give.
        memory: Memory governor of the process.
        limit_bytes: Most bytes of the weights of all models. None: no limit.
    """

    def __init__(
        self, registry: EngineRegistry, base: EngineConfig, memory: MemoryGovernor, limit_bytes: int | None = None
    ) -> None:
        self._registry = registry
        self.base: Final = base
        self._memory = memory
        self.limit_bytes: Final = limit_bytes
        self.users: list[Users] = []
        """Find what needs an engine beside requests, such as a pipeline."""
        self._records: list[ModelRecord] = []
        self._group: EngineGroup[Engine]
        self._tasks: TaskGroup
        self._watch: Watch
        self._turn = anyio.Lock()
        self._stopping = anyio.Event()

    @property
    def records(self) -> Sequence[ModelRecord]:
        """All models, in the order in which they came."""
        return tuple(self._records)

    @property
    def leaving(self) -> Sequence[Engine]:
        """Engines that get no requests any more, and may have some in flight."""
        return [each.engine for each in self._records if each.state == "draining" and each.engine is not None]

    @property
    def is_loading(self) -> bool:
        """True while a model is read, which cannot be interrupted."""
        return any(record.state == "loading" for record in self._records)

    async def run(self, group: EngineGroup[Engine], watch: Watch) -> None:
        """Take part in the operation of a server until cancelled.

        Args:
            group: The engines of the server, all of which get requests.
            watch: See `Watch`.
        """
        self._records = [
            ModelRecord(name=name, config=engine.config, pinned=True, state="ready", engine=engine)
            for name, engine in group.items()
            if not engine.card.is_plugin
        ]
        async with anyio.create_task_group() as self._tasks:
            self._group, self._watch = group, watch
            await anyio.sleep_forever()

    def stop(self) -> None:
        """Let nobody wait for an operation any more: the server drains."""
        self._stopping.set()

    def load(self, wanted: LoadBody) -> ModelRecord:
        """Begin to load a model, which takes the place of the one of its name.

        Raises:
            EngineStopped: The server starts or drains.
            HttpError: The name is taken, or its model is in use otherwise.
        """
        self._registry.enter()
        name = wanted.config.served_name or ""
        old = self._settled(name)
        if old is not None and old.engine is not None:
            self._check_unused(old.engine, "replaced")
        elif any(engine.card.name == name for engine in self._registry.engines):
            raise HttpError(status.IN_USE, f"name: `{name}` is a plugin; plugins come at the start only", param="name")
        self._records = [each for each in self._records if (each.name, each.state) != (name, "failed")]
        pinned = wanted.pin if wanted.pin is not None else old is not None and old.pinned
        record = ModelRecord(name=name, config=wanted.config, pinned=pinned, state="loading")
        self._records.append(record)
        log.info("model.load_asked", model=name)
        self._tasks.start_soon(self._load, record, record.done)
        return record

    def remove(self, name: str) -> ModelRecord:
        """Begin to drain and unload a model. The record of a failed load is dropped at once.

        Raises:
            EngineStopped: The server starts or drains.
            UnknownModel: There is no such model.
            HttpError: The model is loading, draining, in use otherwise, or the only one.
        """
        self._registry.enter()
        record = self._settled(name)
        if record is None:
            failed = next((each for each in self._records if (each.name, each.state) == (name, "failed")), None)
            if failed is None:
                raise self._registry.unknown(name)
            self._records.remove(failed)
            return failed
        if record.engine is None:
            raise RuntimeError("a model without an engine is not ready")
        self._check_unused(record.engine, "removed")
        if sum(not engine.card.is_plugin for engine in self._registry.engines) == 1:
            message = f"`{name}` is the only model, and a server without one answers nothing: load another one first"
            raise HttpError(status.IN_USE, message)
        self._set_aside([record])
        self._tasks.start_soon(self._unload, record, record.done)
        return record

    async def wait(self, record: ModelRecord, wait_s: float) -> bool:
        """Wait for the end of an operation, up to `wait_s` seconds. Returns False if it goes on.

        Raises:
            EngineStopped: The server drains.
        """
        done = record.done
        with anyio.move_on_after(wait_s):
            async with anyio.create_task_group() as waiting:
                for event in (done, self._stopping):
                    waiting.start_soon(_cancel_after, event, waiting.cancel_scope)
        if not done.is_set() and self._stopping.is_set():
            raise EngineStopped("The server drains, and the operation ends with it.", retry_after_s=RETRY_AFTER_S)
        return done.is_set()

    def _settled(self, name: str) -> ModelRecord | None:
        """Return the model that serves under a name; None if there is none.

        Raises:
            HttpError: It is loading or draining.
        """
        found = [each for each in self._records if each.name == name]
        for record in found:
            if record.state in ("loading", "draining"):
                message = f"`{name}` is {record.state}: ask again when that has ended; GET /admin/models tells"
                raise HttpError(status.IN_USE, message, retry_after_s=RETRY_AFTER_S)
        return next((record for record in found if record.state == "ready"), None)

    def _check_unused(self, engine: Engine, done: str) -> None:
        """Reject a change of a model that something refers to."""
        if (user := self._user_of(engine)) is not None:
            raise HttpError(status.IN_USE, f"`{engine.card.name}` cannot be {done}: {user}")

    def _user_of(self, engine: Engine) -> str | None:
        if engine.plugins:
            return f"the plugin {next(iter(engine.plugins))} uses it until the server ends"
        return next((user for users in self.users if (user := users(engine)) is not None), None)

    async def _load(self, record: ModelRecord, done: anyio.Event) -> None:
        try:
            async with self._turn:
                loaded = await self._loaded(record)
                if loaded is not None:
                    await self._switch(record, *loaded)
        finally:
            done.set()

    async def _loaded(self, record: ModelRecord) -> tuple[Engine, Sequence[ModelRecord]] | None:
        """Load a model. Returns its engine, and the models that must leave for it. None: the load failed."""
        try:
            engine = await self._group.load(record.config, partial(self._admit, record.name))
            try:
                return engine, await self._room_for(record.name, weights_bytes(engine.card))
            except BaseException:
                await self._group.unload(engine)
                raise
        except Exception as error:  # noqa: BLE001  # the client learns of it, and the server goes on
            record.problem = problem_of(error)
        record.to("failed")
        failed = [each for each in self._records if each.state == "failed"]
        for each in failed[:-MOST_FAILED]:
            self._records.remove(each)
        log.warning("model.load_failed", model=record.name, reason=record.problem.message)
        await anyio.to_thread.run_sync(collect_garbage)
        return None

    async def _switch(self, record: ModelRecord, engine: Engine, victims: Sequence[ModelRecord]) -> None:
        """Send requests to a new engine, and unload those whose place it takes."""
        old = [each for each in self._ready() if each.name == record.name]
        record.engine = engine
        record.to("ready")
        self._registry.put(engine)
        for each in old:
            each.to("draining")
        log.info("model.ready", model=record.name, **engine.card.summary)
        self._tasks.start_soon(self._watch, engine)
        async with anyio.create_task_group() as leaving:
            for each in (*old, *victims):
                leaving.start_soon(self._unload, each, each.done)

    async def _unload(self, record: ModelRecord, done: anyio.Event) -> None:
        """Unload a model that gets no requests any more. Those in flight have the drain timeout."""
        engine = record.engine
        if engine is None:
            raise RuntimeError("a model that is not loaded cannot be unloaded")
        with anyio.move_on_after(engine.config.drain_timeout_s):
            await engine.wait_unused()
        await self._group.unload(engine)
        self._registry.ended(engine)
        self._records.remove(record)
        record.engine = None
        del engine
        await anyio.to_thread.run_sync(collect_garbage)
        log.info("model.unloaded", model=record.name)
        done.set()

    def _ready(self) -> Iterator[ModelRecord]:
        return (record for record in self._records if record.state == "ready")

    def _admit(self, name: str, needed: int) -> None:
        """Reject a load for which there is no memory, before weights are read."""
        limit = self.limit_bytes
        fixed = sum(each.weights_bytes for each in self._ready() if each.name != name and not self._may_leave(each))
        if limit is not None and fixed + needed > limit:
            beside = f", beside {_megabytes(fixed)} of models that stay" if fixed else ""
            message = f"The weights take about {_megabytes(needed)}{beside}; --models-memory is {show_bytes(limit)}"
            raise HttpError(status.NO_MEMORY, message)
        room = self._memory.room_bytes
        if LOADING_FACTOR * needed > room and self.base.device in ("auto", "cpu"):
            message = (
                f"To load takes about {_megabytes(int(LOADING_FACTOR * needed))}, and the process has "
                f"{_megabytes(room)} left below its memory limit. Remove a model first"
            )
            raise HttpError(status.NO_MEMORY, message)

    def _may_leave(self, record: ModelRecord) -> bool:
        """Return True if a model may be unloaded for another one."""
        return not record.pinned and record.engine is not None and self._user_of(record.engine) is None

    async def _room_for(self, name: str, needed: int) -> Sequence[ModelRecord]:
        """Set the models aside that must leave for a new one, by least recent use.

        Raises:
            HttpError: The others still take too much; or one has requests in flight for longer than the drain timeout.
                Then all serve again.
        """
        if self.limit_bytes is None:
            return ()
        others = [each for each in self._ready() if each.name != name]
        excess = needed + sum(each.weights_bytes for each in others) - self.limit_bytes
        idle = sorted(filter(self._may_leave, others), key=_idle_s, reverse=True)
        victims = []
        while excess > 0 and idle:
            victims.append(idle.pop(0))
            excess -= victims[-1].weights_bytes
        if excess > 0:
            message = f"The weights are {_megabytes(excess)} more than --models-memory allows beside models that stay"
            raise HttpError(status.NO_MEMORY, message)
        self._set_aside(victims)
        with anyio.move_on_after(self.base.drain_timeout_s):
            for each in victims:
                if each.engine is not None:
                    await each.engine.wait_unused()
        busy = [each.name for each in victims if each.engine is not None and each.engine.is_used]
        if busy:
            for each in victims:
                if each.engine is not None:
                    self._registry.put(each.engine)
                each.to("ready")
            message = f"`{busy[0]}` would have to leave, but had requests in flight until the drain timeout"
            raise HttpError(status.NO_MEMORY, message)
        return victims

    def _set_aside(self, records: Sequence[ModelRecord]) -> None:
        """Send no more requests to models, which then drain."""
        for record in records:
            if record.engine is not None:
                self._registry.remove(record.engine)
            record.done = anyio.Event()
            record.to("draining")


async def _cancel_after(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _idle_s(record: ModelRecord) -> float:
    return 0.0 if record.engine is None else record.engine.idle_s


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
