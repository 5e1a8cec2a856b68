"""The engine process: it owns the devices, and computes for all fronts."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from staged_pool.api.config import ServerConfig
from staged_pool.api.fleet.control import Beat, Control, Drain, Loading, Ready
from staged_pool.api.fleet.duties import go_on, obey
from staged_pool.api.fleet.lines import Line, MissedLine, receive_line
from staged_pool.api.fleet.snapshot import snapshot
from staged_pool.api.process_memory import release_memory_of_loading, tune_garbage_collector
from staged_pool.api.tracing.opening import traces_of
from staged_pool.api.tracing.tracer import Tracer
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.device_engine import DeviceEngine
from staged_pool.runtime.engine.front_desk import FrontDesk
from staged_pool.runtime.engine.open import governor_for
from staged_pool.runtime.engine.open_desk import open_desk
from staged_pool.runtime.load_progress import LoadProgress, reporting_loads
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.remote.line import BEAT_S
from staged_pool.stages.errors import DeviceLost
from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.log import get_logger
from staged_pool.stages.unix_stream import UnixStream

log = get_logger("staged_pool.fleet")


async def run_engine_process(
    config: ServerConfig, models: Sequence[EngineConfig], control: socket.socket, handover: socket.socket
) -> None:
    """Load the models, and compute for fronts until the supervisor orders the end.

    Args:
        config: Settings of traces; fronts write the spans of requests, and this process those of batches.
        models: Models to load, at least one.
        control: Control line to the supervisor.
        handover: Socket over which the lines to fronts come.

    Raises:
        ConfigError: A model cannot be loaded.
        DeviceLost: A device failed.
    """
    process = _EngineProcess(models, governor_for(models[0]))
    with single_errors():
        lines = [UnixStream(each) for each in (control, handover)]
        async with traces_of(config) as process.tracer:
            await process.run(*lines)


class _EngineProcess:
    def __init__(self, models: Sequence[EngineConfig], memory: MemoryGovernor) -> None:
        self._models = models
        self._memory = memory
        self._drain = anyio.Event()
        self._desk: FrontDesk | None = None
        self._progress = LoadProgress()
        self.tracer: Tracer | None = None
        """Writes the spans of batches. None: traces are off."""
        self._control: Control
        self._has_served = False

    async def run(self, control: UnixStream, handover: UnixStream) -> None:
        self._control = Control(control, {Drain: lambda _: self._drain.set()})
        async with anyio.create_task_group() as background:
            background.start_soon(obey, self._control.run, lambda: self._has_served)
            background.start_soon(go_on, self._beat)
            background.start_soon(go_on, self._memory.watch)
            await anyio.to_thread.run_sync(self._memory.measure)
            async with self._loaded() as self._desk:
                self._desk.on_batch = None if self.tracer is None else self.tracer.batch
                tune_garbage_collector()
                await anyio.to_thread.run_sync(release_memory_of_loading)
                self._control.post(Ready())
                for engine in self._desk.engines:
                    card = engine.model.card
                    log.info("engine.ready", model=card.name, **card.summary)
                async with anyio.create_task_group() as serving:
                    serving.start_soon(go_on, self._take_fronts, handover, serving)
                    for engine in self._desk.engines:
                        serving.start_soon(self._watch, engine)
                    await self._drain.wait()
                    serving.cancel_scope.cancel()
            self._has_served = True
            background.cancel_scope.cancel()
        await handover.aclose()

    @asynccontextmanager
    async def _loaded(self) -> AsyncIterator[FrontDesk]:
        """Load the models for a block."""
        with reporting_loads(self._progress):
            async with open_desk(self._models, self._memory) as desk:
                yield desk

    async def _take_fronts(self, handover: UnixStream, serving: TaskGroup) -> None:
        while (line := await receive_line(handover)) is not None:
            if isinstance(line, MissedLine):  # the front finds that it has ended, and gets another one
                log.warning("line.not_taken", reason=line.reason)
            else:
                serving.start_soon(self._serve, line)

    async def _serve(self, line: Line) -> None:
        """Serve a front until its line ends. An error of one line is no reason to leave the other fronts."""
        assert self._desk is not None
        try:
            reason = await self._desk.serve(line.stream, line.rings)
        except Exception:
            log.exception("front.failed")
        else:
            log.info("front.left", reason=reason)

    async def _watch(self, engine: DeviceEngine) -> None:
        raise DeviceLost(await engine.wait_broken())

    async def _beat(self) -> None:
        """Tell the fronts the state of each model, and the supervisor the work so far."""
        while True:
            desk = self._desk
            if desk is None:
                self._control.post_report(Loading(self._progress.status))
            else:
                desk.tell_states()
            engines = [] if desk is None else desk.engines
            self._control.post_report(
                Beat(
                    snapshot(
                        {engine.model.card.name: engine.statistics() for engine in engines},
                        loads={engine.model.card.name: engine.load() for engine in engines},
                    )
                )
            )
            await anyio.sleep(BEAT_S)
