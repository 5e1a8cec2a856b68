"""A loaded model, measured bare, through an engine, and over HTTP, in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Final, TypeAlias

import anyio
import anyio.to_thread

from perf.gpu.device_watch import DeviceUse, DeviceWatch, TimedLauncher
from perf.gpu.loaded import text_transformer
from perf.tools.load import Load, LoadGenerator, LoadOutcome
from perf.tools.workers import Worker, worker
from staged_pool.api.commands.process import run as run_loop
from staged_pool.api.config import ServerConfig
from staged_pool.api.http.listener import bind
from staged_pool.api.http.server import Server
from staged_pool.api.process_memory import tune_garbage_collector
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.load import load_model, share_memory
from staged_pool.runtime.payloads import Payload
from staged_pool.runtime.requests import Content
from staged_pool.runtime.threads.dedicated_threads import DedicatedThreads
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.offload import ThreadOffload

GENERATORS: Final = 2
"""Processes that generate load, so that the client is not what limits it."""

_BODY_LIMIT: Final = 64 * 2**20

ServedProgram: TypeAlias = "Callable[[Served], Awaitable[None]]"
"""Measurements beside a server."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Work of one measurement."""

    inputs_per_s: float
    tokens_per_s: float
    use: DeviceUse
    latencies_ms: Sequence[float] = ()
    """Latency of each request; empty without requests."""
    batch_tokens: float = 0.0
    """Mean tokens of a forward."""


@dataclass(frozen=True, slots=True, eq=False)
class Hosted:
    """A loaded model on one device.

    Args:
        config: Settings, as for a server.
    """

    config: EngineConfig
    model: Encoder
    watch: DeviceWatch

    @staticmethod
    def load(config: EngineConfig) -> Hosted:
        """Load a model as a server does, and watch its launches."""
        (model,) = share_memory([load_model(config)])
        (replica,) = model.replicas
        watch = DeviceWatch(replica.device)
        replica.launchers = {
            lane: TimedLauncher(launcher, watch.events) for lane, launcher in replica.launchers.items()
        }
        tune_garbage_collector()  # as a server does once its models are loaded
        return Hosted(config, model, watch)

    @property
    def batch_tokens(self) -> int:
        """Tokens of the largest batch."""
        return self.config.batch_tokens(self.model.card.device, self.model.card.memory_tokens)

    def with_settings(self, *, ahead: bool = True, graphs: bool = True) -> Hosted:
        """Return the same weights without forwards launched ahead, or without recorded ones.

        Recorded forwards are dropped from this model, too, and cannot be had again.
        """
        card = self.model.card if ahead else replace(self.model.card, launched_ahead=0)
        if not graphs:
            text_transformer(self.model).graphs = None
        return replace(self, model=replace(self.model, card=card))

    def bare(self, payloads: Sequence[Payload], seconds: float, *, batch_tokens: int) -> Rate:
        """Run full forwards one after the other, without stages and HTTP.

        As many threads launch them as the engine has: one more than run.

        Args:
            payloads: Preprocessed inputs, which are repeated.
            seconds: Length of the measurement.
            batch_tokens: Most tokens of a batch.
        """
        batches = _batches(payloads, batch_tokens)
        turns, lock, done = cycle(batches), threading.Lock(), [0, 0, 0]

        def forwards(until: float) -> None:
            while time.perf_counter() < until:
                with lock:
                    batch = next(turns)
                self.model.forward(batch)
                with lock:
                    done[0] += len(batch)
                    done[1] += sum(payload.tokens for payload in batch)
                    done[2] += 1

        for length_s in (min(0.3, seconds), seconds):  # the first is a warm-up
            done[:] = 0, 0, 0
            started = time.perf_counter()
            threads = [
                threading.Thread(target=forwards, args=(started + length_s,))
                for _ in range(self.model.card.forward_calls)
            ]
            with self.watch.watched() as use:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            elapsed_s = time.perf_counter() - started
        return Rate(done[0] / elapsed_s, done[1] / elapsed_s, use, batch_tokens=done[1] / max(1, done[2]))

    def serve(self, program: ServedProgram) -> None:
        """Run a program beside a server of this model, in the event loop of `staged-pool serve`."""
        run_loop("asyncio", partial(self._serve, program))

    async def _serve(self, program: ServedProgram) -> None:
        listener = bind("127.0.0.1", 0)
        config = ServerConfig(body_limit_bytes=_BODY_LIMIT)
        opened = anyio.Event()

        @asynccontextmanager
        async def engines(
            configs: Sequence[EngineConfig], memory: MemoryGovernor
        ) -> AsyncIterator[Mapping[str, Engine]]:
            async with self._engine(configs[0], memory) as engine:
                opened.set()
                yield {self.model.card.name: engine}

        server = Server(config, [self.config], open_engines=engines)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run, listener)
            await opened.wait()
            await program(Served(self, server.registry.engines[0], listener.getsockname()[1]))
            await server.close()

    @asynccontextmanager
    async def _engine(self, config: EngineConfig, memory: MemoryGovernor) -> AsyncIterator[Engine]:
        """Run the engine with the threads of `open_engines`, on the model that is loaded already."""
        calls = self.model.card.forward_calls
        async with AsyncExitStack() as stack:
            device, image_device = [
                await stack.enter_async_context(DeviceThreads(name, watchdog_s=config.watchdog_s).running(calls))
                for name in ("device", "image device")
            ]
            image_preprocess = await stack.enter_async_context(
                DedicatedThreads("image preprocess").running(config.image_preprocess_threads)
            )
            engine = await stack.enter_async_context(
                run_engine(
                    config,
                    self.model,
                    device=device,
                    image_device=image_device,
                    preprocess=ThreadOffload(config.preprocess_limit),
                    image_preprocess=image_preprocess,
                    memory=memory,
                )
            )
            yield engine


class RemoteLoad:
    """Generator of any load on any port, for a process of its own."""

    def __call__(self, given: tuple[int, tuple[bytes, ...], Load]) -> LoadOutcome:
        """Run a load: the port, the requests, and the load."""
        port, requests, load = given
        generator = LoadGenerator(port, requests)
        try:
            return generator(load)
        finally:
            generator.close()


Generators: TypeAlias = "Sequence[Worker[tuple[int, tuple[bytes, ...], Load], LoadOutcome]]"


@contextmanager
def generators() -> Iterator[Generators]:
    """Start the processes that generate load."""
    with ExitStack() as running:
        yield [running.enter_context(worker(RemoteLoad)) for _ in range(GENERATORS)]


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A model that an engine and a server of this process run."""

    hosted: Hosted
    engine: Engine
    port: int

    async def library(self, requests: Sequence[Sequence[Content]], *, clients: int, seconds: float) -> Rate:
        """Embed lists of inputs, in a closed loop of tasks of the event loop."""
        turns, latencies_ms = cycle(requests), list[float]()

        async def client(until: float) -> None:
            while (began := time.perf_counter()) < until:
                await self.engine.embed(next(turns))
                latencies_ms.append((time.perf_counter() - began) * 1e3)

        async def run(length_s: float) -> None:
            latencies_ms.clear()
            until = time.perf_counter() + length_s
            async with anyio.create_task_group() as tasks:
                for _ in range(clients):
                    tasks.start_soon(client, until)

        await run(min(0.3, seconds))
        before, began = self._counted(), time.perf_counter()
        with self.hosted.watch.watched() as use:
            await run(seconds)
        return self._rate(before, time.perf_counter() - began, use, latencies_ms)

    async def http(self, generate: Generators, requests: tuple[bytes, ...], *, clients: int, seconds: float) -> Rate:
        """Send requests over HTTP from other processes, in a closed loop."""
        shares = [clients // len(generate) + (place < clients % len(generate)) for place in range(len(generate))]
        busy = [one for one, share in zip(generate, shares, strict=True) if share]

        def run(length_s: float) -> list[LoadOutcome]:
            for one, share in zip(busy, shares, strict=False):
                one.begin((self.port, requests, Load(clients=share, seconds=length_s, patience_s=30.0)))
            return [one.end() for one in busy]

        await anyio.to_thread.run_sync(run, min(0.3, seconds))
        before, began = self._counted(), time.perf_counter()
        with self.hosted.watch.watched() as use:
            outcomes = await anyio.to_thread.run_sync(run, seconds)
        elapsed_s = time.perf_counter() - began
        if unanswered := sum(outcome.unanswered for outcome in outcomes):
            raise RuntimeError(f"{unanswered} requests have no answer")
        return self._rate(before, elapsed_s, use, [ms for outcome in outcomes for ms in outcome.latencies_ms])

    def _counted(self) -> tuple[int, int, int]:
        """Return the items, tokens and batches that the device has done."""
        device = self.engine.statistics().device
        return device.items, device.tokens, sum(device.batches.values())

    def _rate(
        self, before: tuple[int, int, int], elapsed_s: float, use: DeviceUse, latencies_ms: Sequence[float]
    ) -> Rate:
        items, tokens, batches = (now - then for now, then in zip(self._counted(), before, strict=True))
        return Rate(items / elapsed_s, tokens / elapsed_s, use, latencies_ms, tokens / max(1, batches))


def _batches(payloads: Sequence[Payload], most_tokens: int) -> list[list[Payload]]:
    """Group neighbours to batches of at most `most_tokens`; the last, which is less full, is left out."""
    batches: list[list[Payload]] = [[]]
    tokens = 0
    for payload in payloads:
        if batches[-1] and tokens + payload.tokens > most_tokens:
            batches.append([])
            tokens = 0
        batches[-1].append(payload)
        tokens += payload.tokens
    return batches[:-1] or batches
