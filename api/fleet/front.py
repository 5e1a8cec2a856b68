"""A front: HTTP, parse, preprocess and postprocess, in front of the engine process."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count

import anyio

from staged_pool.api.app.fleet import Gate
from staged_pool.api.config import ServerConfig
from staged_pool.api.fleet.control import Ask, Beat, Control, Drain, Loading, Ready, Tell, receive_line
from staged_pool.api.fleet.snapshot import snapshot
from staged_pool.api.http.server import Server
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open_front import open_front_engines
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.pipelines.file import PipelineFile
from staged_pool.runtime.remote.line import BEAT_S, FrontLine
from staged_pool.stages.errors import EngineStopped
from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.log import get_logger
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.unix_stream import UnixStream

ANSWER_S = 2.0
"""Longest wait for a report of the supervisor, in seconds."""

log = get_logger("staged_pool.fleet")


async def run_front(
    config: ServerConfig,
    models: Sequence[EngineConfig],
    pipelines: Sequence[PipelineFile],
    *,
    listener: socket.socket,
    control: socket.socket,
    handover: socket.socket,
    others_serve: bool,
) -> None:
    """Serve until the supervisor orders the end, and the requests in flight are answered.

    Args:
        config: Settings of HTTP.
        models: Models of the engine process.
        pipelines: Pipelines to serve, on these models.
        listener: The listening socket, which other fronts have, too.
        control: Control line to the supervisor.
        handover: Socket over which lines to the engine process come.
        others_serve: Leave connections to the other fronts until this one is ready.
    """
    front = _Front(config, models, pipelines, others_serve=others_serve)
    with single_errors():
        await front.run(listener, UnixStream(control), UnixStream(handover))


class _Front:
    def __init__(
        self,
        config: ServerConfig,
        models: Sequence[EngineConfig],
        pipelines: Sequence[PipelineFile],
        *,
        others_serve: bool,
    ) -> None:
        self._line = FrontLine(StageOptions().clock)
        self._server = Server(config, models, open_engines=self._open_engines, pipelines=pipelines, fleet=self)
        self.gate = Gate(is_open=not others_serve)
        self._control: Control
        self._drain = anyio.Event()
        self._numbers = count(1)
        self._asked: dict[int, tuple[anyio.Event, list[bytes]]] = {}

    async def run(self, listener: socket.socket, control: UnixStream, handover: UnixStream) -> None:
        follow_load = self._server.registry.follow_load
        self._control = Control(
            control,
            {
                Drain: lambda _: self._drain.set(),
                Loading: lambda loading: follow_load(loading.status),
                Tell: self._told,
            },
        )
        async with anyio.create_task_group() as background:
            background.start_soon(self._run_control)
            background.start_soon(self._beat)
            background.start_soon(self._take_lines, handover)
            background.start_soon(self._close_when_told)
            await self._server.run(listener)
            self._post_beat()
            self._control.close()
            background.cancel_scope.cancel()

    async def report(self, name: str) -> bytes:
        """Return a report on all processes.

        Args:
            name: `metrics`, `openmetrics` or `stages`.

        Raises:
            EngineStopped: The supervisor does not answer.
        """
        number, answer = next(self._numbers), (anyio.Event(), list[bytes]())
        self._asked[number] = answer
        self._post_beat()
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

    @asynccontextmanager
    async def _open_engines(
        self, models: Sequence[EngineConfig], memory: MemoryGovernor
    ) -> AsyncIterator[Mapping[str, Engine]]:
        """Open the engines of this front.

        While the models load, it answers that they do. From the moment that they are loaded another front may be
        ready, so this one takes no connections until it is, too.
        """
        await self._line.welcomed.wait()
        self.gate.close()
        async with open_front_engines(self._line, models, memory) as engines:
            self._control.post(Ready())
            yield engines

    async def _run_control(self) -> None:
        await self._control.run()
        os._exit(0)  # the supervisor is gone, and takes the engine process with it

    async def _take_lines(self, handover: UnixStream) -> None:
        """Serve one line to the engine process after another."""
        while (line := await receive_line(handover)) is not None:
            reason = await self._line.run(*line)
            log.warning("engine.lost", reason=reason)

    async def _close_when_told(self) -> None:
        await self._drain.wait()
        await self._server.close()

    async def _beat(self) -> None:
        while True:
            self._post_beat()
            self._line.beat()
            await anyio.sleep(BEAT_S)

    def _post_beat(self) -> None:
        registry = self._server.registry
        self._control.post(
            Beat(
                snapshot(
                    registry.statistics(),
                    pipelines=registry.pipeline_statistics(),
                    http=self._server.http_statistics(),
                )
            )
        )
