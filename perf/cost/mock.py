"""A server with a mock model on one core, to measure HTTP and stages alone.

Run by the `front` command.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Final

import numpy as np
import typer

from perf.tools.servers import Backend
from staged_pool.api.commands import logs
from staged_pool.api.commands.process import prepare_environment, run
from staged_pool.api.config import ServerConfig
from staged_pool.api.http.listener import bind
from staged_pool.api.http.server import Server
from staged_pool.runtime.card import Lane, ModelCard
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.payloads import Payload, Row, TokenSequence
from staged_pool.runtime.requests import Chat, Output, TextInput
from staged_pool.runtime.statistics import ImageCacheStatistics, ReplicaStatistics
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.runtime.tokens import Tokens
from staged_pool.stages.errors import InvalidInput, ModelFailed, Unsupported
from staged_pool.stages.work import Prepared

WIDTH: Final = 384
"""Width of a vector, the same as MiniLM's, so that answers have the same size."""


class MockModel:
    """Mock model: its forward returns the same vector for every text, without computing.

    A text has one token for each word. Thread-safe.

    Args:
        forward_s: Seconds that a forward sleeps.
    """

    def __init__(self, forward_s: float = 0.0) -> None:
        self._forward_s = forward_s
        self._vector = np.linspace(-1.0, 1.0, WIDTH, dtype=np.float32)
        self.card = ModelCard(
            name="mock",
            architecture="MockModel",
            parameters=0,
            width=WIDTH,
            max_tokens=512,
            vocabulary=30_522,
            pooling="mean",
            normalize=True,
            dtype="float32",
            device="cpu",
            attention="packed",
            torch_threads=1,
            forward_workers=1,
            load_s=0.0,
        )

    def warm_up(self, lane: Lane) -> None:
        """Do nothing: no thread has anything to make ready."""

    def release(self) -> None:
        """Do nothing: it has no weights."""

    def pads(self, lane: Lane) -> bool:
        return False

    def preprocess(self, inputs: Sequence[ModelInput]) -> Sequence[Prepared[Payload] | InvalidInput]:
        return [self._prepared(given) for given in inputs]

    def forward(self, payloads: Sequence[Payload], at_once: int = 1, /) -> Sequence[Row | ModelFailed]:
        if self._forward_s:
            time.sleep(self._forward_s)
        return [Row({Output.DENSE: self._vector}, payload) for payload in payloads]

    def tokenize(self, source: str | Chat, *, add_special_tokens: bool) -> Tokens:
        raise Unsupported("The mock model has no tokenizer.")

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        raise Unsupported("The mock model has no tokenizer.")

    @property
    def devices(self) -> Sequence[ReplicaStatistics]:
        return ()

    @property
    def image_cache(self) -> ImageCacheStatistics | None:
        return None

    def clear_image_cache(self) -> None:
        """Do nothing: there is no cache."""

    def close(self) -> None:
        """Do nothing: there are no processes."""

    def _prepared(self, given: ModelInput) -> Prepared[Payload] | InvalidInput:
        if not isinstance(given.source, TextInput) or not isinstance(given.source.source, str):
            return InvalidInput("The mock model reads texts only.", param="input")
        tokens = len(given.source.source.split())
        if not tokens:
            return InvalidInput("The input has no tokens.", param="input")
        return Prepared(TokenSequence([0] * tokens, given.outputs), tokens)


@asynccontextmanager
async def engines_of(
    model: MockModel, configs: Sequence[EngineConfig], memory: MemoryGovernor
) -> AsyncIterator[Mapping[str, Engine]]:
    """Run an engine on a mock model, with a device thread like a real one."""
    (config,) = configs
    async with (
        DeviceThreads("staged-pool device", watchdog_s=config.watchdog_s).running() as device,
        run_engine(config, model, device=device, memory=memory) as engine,
    ):
        yield {model.card.name: engine}


def main(
    *,
    backend: Annotated[Backend, typer.Option(help="Event loop.")] = "asyncio",
    forward: Annotated[float, typer.Option(min=0, help="Seconds that a forward sleeps.")] = 0.0,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Maximum concurrent requests.")
    ] = EngineConfig().max_requests,
    trace_endpoint: Annotated[str | None, typer.Option(help="Collector of traces.")] = None,
    trace_ratio: Annotated[float, typer.Option(help="Part of the requests that are traced.")] = 0.01,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.")],
) -> None:
    """Serve until a signal, on the first core that this process may use."""
    core = min(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):  # numpy has started some; later threads inherit the core
        os.sched_setaffinity(int(thread), {core})
    prepare_environment(offline=True)
    logs.configure()
    model, config = MockModel(forward), EngineConfig(coalesce=False, max_requests=max_requests, drain_timeout_s=1.0)
    listener = bind("127.0.0.1", port)

    async def serve() -> None:
        http = ServerConfig(trace_endpoint=trace_endpoint, trace_ratio=trace_ratio)
        server = Server(http, [config], owns_process=True, open_engines=partial(engines_of, model))
        await server.run(listener)

    run(backend, serve)


if __name__ == "__main__":
    typer.run(main)
