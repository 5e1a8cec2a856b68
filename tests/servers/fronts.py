"""Fronts and the engine process's part in one process, on real sockets and shared memory."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import anyio
from anyio.abc import TaskGroup

from staged_pool.runtime.caching.fingerprints import new_secret
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.device_engine import DeviceEngine
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.front_desk import FrontDesk
from staged_pool.runtime.engine.lanes import LaneLimits, LaneParts, lane_service_time
from staged_pool.runtime.engine.open_front import run_front_engine
from staged_pool.runtime.memory.governor import UNLIMITED_BYTES, MemoryGovernor
from staged_pool.runtime.model import Model
from staged_pool.runtime.remote.line import FrontLine
from staged_pool.runtime.remote.messages import ModelTerms
from staged_pool.runtime.remote.port import RING_BYTES, Rings
from staged_pool.runtime.remote.store import ArrayStore
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.ring import open_memory
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.unix_stream import UnixStream


def terms_of(model: Model, config: EngineConfig) -> ModelTerms:
    """Return the terms that the engine process gives fronts for a model."""
    card = model.card
    return ModelTerms(
        card=card,
        preparation=None,
        fed_limits={lane: LaneLimits.of_model(lane, config, card).fed_tokens for lane in card.lanes},
        secret=new_secret(),
    )


@asynccontextmanager
async def device_engine_on(model: Model, config: EngineConfig, desk: FrontDesk) -> AsyncIterator[DeviceEngine]:
    """Run the engine process's part of a model, with a device thread for each lane."""
    async with AsyncExitStack() as stack:
        lanes = {}
        for lane in model.card.lanes:
            threads = DeviceThreads(f"test device of {lane}", watchdog_s=config.watchdog_s)
            device = await stack.enter_async_context(threads.running(model.card.forward_workers))
            lanes[lane] = LaneParts(
                device=device, preprocess=device, service_time=lane_service_time(lane, config, model.card)
            )
        engine = DeviceEngine(
            config,
            model,
            lanes=lanes,
            give=partial(desk.give, 0),
            shared_cores=None,
            options=StageOptions(),
            memory=MemoryGovernor(UNLIMITED_BYTES),
        )
        yield await stack.enter_async_context(engine.running())


@dataclass
class Joined:
    """One front and its line."""

    line: FrontLine
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ends: list[str] = field(default_factory=list)
    """Reasons for the ends of the line, of both sides."""


async def join(
    tasks: TaskGroup,
    desk: FrontDesk,
    front: Joined,
    *,
    ring_bytes: int = RING_BYTES,
    stores: tuple[ArrayStore, ArrayStore] | None = None,
) -> None:
    """Make a line, and wait until the front is welcome.

    Args:
        tasks: Run both ends.
        desk: The engine process's end.
        front: The front.
        ring_bytes: Shared memory of the line in each direction. 0: there is none.
        stores: Stores of the front and of the engine process.
    """
    own, its = stores or (None, None)
    ours, theirs = socket.socketpair()
    up, down = (open_memory(ring_bytes), open_memory(ring_bytes)) if ring_bytes else (-1, -1)
    dups = (os.dup(down), os.dup(up)) if ring_bytes else ()
    both = (Rings.mapped(up, down), Rings.mapped(*dups)) if ring_bytes else (None, None)
    front_end = UnixStream(ours)
    engine_end = UnixStream(theirs)
    front.scope = anyio.CancelScope()

    async def serve() -> None:
        with front.scope:
            front.ends.append(await desk.serve(engine_end, both[1], its))

    async def run() -> None:
        front.ends.append(await front.line.run(front_end, both[0], own))

    tasks.start_soon(serve)
    tasks.start_soon(run)
    with anyio.fail_after(10):
        await front.line.welcomed.wait()
        while front.line.fault:  # noqa: ASYNC110  # the event stays set from the line before
            await anyio.sleep(0.001)


@asynccontextmanager
async def fronts_on(
    model: Model,
    config: EngineConfig | None = None,
    *,
    fronts: int = 1,
    front_model: Model | None = None,
    ring_bytes: int = RING_BYTES,
    patience_s: float = 0.0,
    stores: Callable[[], tuple[ArrayStore, ArrayStore]] | None = None,
    engine_class: type[Engine] = Engine,
) -> AsyncIterator[tuple[Sequence[Engine], DeviceEngine, FrontDesk, Sequence[Joined]]]:
    """Run fronts on one model in front of one engine process's part of it.

    Args:
        model: Computes.
        config: Settings of all engines.
        fronts: Number of fronts.
        front_model: Prepares, in all fronts. None: `model` does.
        ring_bytes: Shared memory of each line in each direction. 0: there is none.
        patience_s: Longest wait of a request for an engine process that is away.
        stores: Makes the stores of a line, for the front and for the engine process. None: lines have none.
        engine_class: Class of the front engines.
    """
    config = config or EngineConfig()
    prepares = front_model or model
    desk = FrontDesk()
    async with AsyncExitStack() as stack:
        device = await stack.enter_async_context(device_engine_on(model, config, desk))
        desk.add(device, terms_of(model, config))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        joined = [Joined(FrontLine(StageOptions().clock, patience_s)) for _ in range(fronts)]
        engines = []
        for front in joined:
            await join(tasks, desk, front, ring_bytes=ring_bytes, stores=None if stores is None else stores())
            running = run_front_engine(config, prepares, front.line, engine_class=engine_class)
            engines.append(await stack.enter_async_context(running))
        yield engines, device, desk, joined
