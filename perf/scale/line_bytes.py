"""Bytes between a front and the engine process: real frames of real requests, counted on a socket pair."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final

import anyio

from perf.tools.servers import Options
from staged_pool.runtime.memory.governor import UNLIMITED_BYTES, MemoryGovernor
from staged_pool.runtime.remote.line import FrontLine
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.unix_stream import UnixStream

_REPEATS: Final = 4
"""Times that each list is sent; one request more comes before, which is not counted."""

Lists = Sequence[Sequence[str]]


class _Counted:
    """A stream that counts the bytes that it sends."""

    def __init__(self, stream: UnixStream) -> None:
        self._stream = stream
        self.sent = 0

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await self._stream.receive(max_bytes)

    async def send(self, item: bytes) -> None:
        self.sent += len(item)
        await self._stream.send(item)

    async def aclose(self) -> None:
        await self._stream.aclose()


class LineBytes:
    """Front and engine process's part in one process, joined by a socket pair.

    Arrays that would go through shared memory go through the socket, too, and are counted.

    Args:
        options: Options with the model.
    """

    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(self, lists: Lists) -> list[tuple[float, float]]:
        """Return the bytes to and from the engine process, of a request with each list."""
        return anyio.run(self._count, lists)

    async def _count(self, lists: Lists) -> list[tuple[float, float]]:
        from staged_pool.runtime.engine.open_desk import open_desk
        from staged_pool.runtime.engine.open_front import open_front_engines

        config, memory = self._options.engine_config(), MemoryGovernor(UNLIMITED_BYTES)
        ours, theirs = socket.socketpair()
        up = _Counted(UnixStream(ours))
        down = _Counted(UnixStream(theirs))
        line, counted = FrontLine(StageOptions().clock), []
        async with open_desk([config], memory) as desk, anyio.create_task_group() as tasks:
            tasks.start_soon(desk.serve, down, None)
            tasks.start_soon(line.run, up, None)
            async with open_front_engines(line, [config], memory) as engines:
                (engine,) = engines.values()
                for texts in lists:
                    await engine.embed(texts)
                    before = up.sent, down.sent
                    for _ in range(_REPEATS):
                        await engine.embed(texts)
                    counted.append(((up.sent - before[0]) / _REPEATS, (down.sent - before[1]) / _REPEATS))
            tasks.cancel_scope.cancel()
        return counted
