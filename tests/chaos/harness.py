"""A server under attack, and the conditions that must hold afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import anyio.abc
import httpx

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.threads.dedicated_threads import DedicatedThreads, ThreadsPart
from staged_pool.stages.offload import Offload, ThreadOffload
from staged_pool.stages.stage import StageOptions
from tests.servers.on_socket import Served, serving
from tests.support.channels import acting_channels
from tests.support.gates import Gate
from tests.support.model import LetterModel

POOLS = ("AnyIO worker thread", "Trio thread", "asyncio_")
"""Name prefixes of pool threads: the stages' idle threads, and asyncio's own pool, which resolves host names.

asyncio's pool grows when there are more concurrent lookups than before.
"""


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def thread_names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


def own_threads() -> int:
    return sum(not name.startswith(POOLS) for name in thread_names())


@dataclass(kw_only=True)
class Attacked:
    """A server, and the shape that it had before."""

    served: Served
    files: int = field(default_factory=open_files)
    threads: int = field(default_factory=own_threads)

    async def talk(self, request: bytes) -> bytes:
        """Send bytes, which the server may stop reading, and read until it closes the connection."""
        received = b""
        async with await self.served.connect() as stream, anyio.create_task_group() as tasks:

            async def send() -> None:
                with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    await stream.send(request)

            tasks.start_soon(send)
            with anyio.fail_after(30), suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    received += await stream.receive()
            tasks.cancel_scope.cancel()
        return received

    async def assert_unharmed(self) -> None:
        """Check that the server answers and that nothing is left.

        Left could be a request, item, token, byte, connection, limiter token, file or thread.
        """
        await self.served.assert_alive()
        await eventually(lambda: not self._left(), lambda: (self._left(), thread_names()))
        async with self.served.client() as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/ready")).status_code == 200

    def _left(self) -> dict[str, float]:
        state, engine = self.served.server.state, self.served.engine
        statistics = engine.statistics()
        admission = statistics.admission
        left = {
            "connections": state.connections,
            "http requests": state.requests,
            "http body bytes": state.body_bytes,
            "requests": admission.requests,
            "items": admission.items,
            "tokens": admission.tokens,
            "bytes": admission.body_bytes,
            "fetches": engine._stages.parse._completer.fetching,  # type: ignore[attr-defined]
            "files": max(0, open_files() - self.files),
            "threads": max(0, own_threads() - self.threads),
        }
        for lane, preprocess in engine._stages.preprocess.items():
            left[f"threads of {lane}"] = _borrowed(preprocess._offload)
        for stage in statistics.stages:
            left |= {f"{stage.name} waiting": stage.waiting, f"{stage.name} busy": stage.busy}
        return {name: value for name, value in left.items() if value}


@dataclass(kw_only=True)
class UnderFire(Attacked):
    """A server whose model the test controls."""

    model: LetterModel
    act: Callable[[str], Awaitable[None]] | None = None
    """An action between the stages, from now on: see `acting_channels`."""
    gates: list[Gate] = field(default_factory=list)

    @staticmethod
    @asynccontextmanager
    async def opened(engine: EngineConfig | None = None, **config: Any) -> AsyncIterator[UnderFire]:
        model = LetterModel()
        fires: list[UnderFire] = []

        async def act(point: str) -> None:
            if fires and fires[0].act is not None:
                await fires[0].act(point)

        options = StageOptions(channel=acting_channels(act))
        async with serving(model, options=options, engine=engine, **config) as served:
            await served.assert_alive()
            fires.append(UnderFire(served=served, model=model))
            try:
                yield fires[0]
            finally:
                for gate in fires[0].gates:
                    gate.open()

    def gate(self, stage: Literal["preprocess", "forward"] = "preprocess") -> Gate:
        """Hold the threads of a stage from now on. Opened at the end, whatever the test does."""
        gate = Gate()
        setattr(self.model, f"on_{stage}", gate)
        self.gates.append(gate)
        return gate

    @property
    def seen(self) -> list[str]:
        """The texts that reached preprocess, but for those of the harness."""
        return [text for texts in self.model.preprocessed for text in texts if text != "alive"]

    @property
    def computed(self) -> list[str]:
        """The texts that reached the device, but for those of the harness."""
        return [text for texts in self.model.forwarded for text in texts if text != "alive"]

    async def assert_unharmed(self) -> None:
        self.act = None
        for gate in self.gates:
            gate.open()
        await super().assert_unharmed()

    async def embed(self, *texts: str, **headers: str) -> httpx.Response:
        async with self.served.client() as client:
            return await client.post("/v1/embeddings", json={"input": texts}, headers=headers)


async def eventually(condition: Callable[[], bool], explain: Callable[[], object] = lambda: "") -> None:
    """Poll a condition that other processes, threads or the kernel's timers bring about."""
    with anyio.move_on_after(15):
        while not condition():  # noqa: ASYNC110  # what is polled may be another process
            await anyio.sleep(0.005)
        return
    raise AssertionError(f"it never came: {explain()}")


def _borrowed(offload: Offload) -> int:
    """Threads that are in use."""
    if isinstance(offload, ThreadsPart):
        offload = offload._threads
    if isinstance(offload, DedicatedThreads):
        return len(offload._workers) - len(offload._idle)
    assert isinstance(offload, ThreadOffload)
    return int(offload.limiter.borrowed_tokens)
