"""A front: HTTP, parse, preprocess and postprocess, in front of the engine process."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import anyio

from staged_pool.api.config import ServerConfig
from staged_pool.api.fleet.duties import go_on, obey
from staged_pool.api.fleet.front_control import FrontControl
from staged_pool.api.fleet.lines import Line, receive_line, take_lines
from staged_pool.api.fleet.snapshot import Snapshot, snapshot
from staged_pool.api.http.process_setup import allow_files
from staged_pool.api.http.server import SPARE_FILES, Server
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open_front import open_front_engines
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.pipelines.file import PipelineFile
from staged_pool.runtime.remote.line import BEAT_S, FrontLine
from staged_pool.stages.errors import StagedPoolError
from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.unix_stream import UnixStream

LAST_WORDS_S: Final = 1.0
"""Longest wait at the end for the supervisor to read the last report, in seconds."""


async def run_front(
    config: ServerConfig,
    models: Sequence[EngineConfig],
    pipelines: Sequence[PipelineFile],
    *,
    listener: socket.socket,
    control: socket.socket,
    handover: socket.socket,
) -> None:
    """Serve until the supervisor orders the end, and the requests in flight are answered.

    Args:
        config: Settings of HTTP.
        models: Models of the engine process.
        pipelines: Pipelines to serve, on these models.
        listener: The listening socket, which other fronts have, too.
        control: Control line to the supervisor.
        handover: Socket over which lines to the engine process come.

    Raises:
        StagedPoolError: The front has ended, and nobody has asked for it.
    """
    allow_files(config.max_connections + SPARE_FILES)
    with single_errors():
        front = _Front(config, models, pipelines, UnixStream(control))
        await front.run(listener, UnixStream(handover))


class _Front:
    def __init__(
        self,
        config: ServerConfig,
        models: Sequence[EngineConfig],
        pipelines: Sequence[PipelineFile],
        control: UnixStream,
    ) -> None:
        self._line = FrontLine(StageOptions().clock)
        self._server = Server(config, models, open_engines=self._open_engines, pipelines=pipelines, fleet=self)
        self._control = FrontControl(
            control,
            follow_load=self._server.registry.follow_load,
            snapshot=self._snapshot,
        )
        self.accepting = self._control.accepting
        self.ready = self._control.ready
        self.report = self._control.report
        self._has_served = False

    async def run(self, listener: socket.socket, handover: UnixStream) -> None:
        async with anyio.create_task_group() as obeying:
            obeying.start_soon(obey, self._control.run, lambda: self._has_served)
            async with anyio.create_task_group() as background:
                background.start_soon(go_on, self._beat)
                background.start_soon(go_on, self._take_lines, handover)
                background.start_soon(self._close_when_told)
                await self._server.run(listener)
                background.cancel_scope.cancel()
            if not self._control.drain.is_set():
                raise StagedPoolError("the front has ended, and nobody has asked for it")
            self._has_served = True
            self._control.close()
            obeying.cancel_scope.deadline = anyio.current_time() + LAST_WORDS_S

    @asynccontextmanager
    async def _open_engines(
        self, models: Sequence[EngineConfig], memory: MemoryGovernor
    ) -> AsyncIterator[Mapping[str, Engine]]:
        """Open the engines of this front, once the engine process has loaded the models."""
        await self._line.welcomed.wait()
        self.accepting.welcomed()
        async with open_front_engines(self._line, models, memory) as engines:
            yield engines

    async def _take_lines(self, handover: UnixStream) -> None:
        await take_lines(partial(receive_line, handover), self._serve_line, self._control.lost)

    async def _serve_line(self, line: Line) -> str:
        return await self._line.run(line.stream, line.rings)

    async def _close_when_told(self) -> None:
        await self._control.drain.wait()
        await self._server.close()

    async def _beat(self) -> None:
        while True:
            self._control.beat()
            self._line.beat()
            await anyio.sleep(BEAT_S)

    def _snapshot(self) -> Snapshot:
        registry = self._server.registry
        return snapshot(
            registry.statistics(),
            pipelines=registry.pipeline_statistics(),
            http=self._server.http_statistics(),
        )
