"""Engine replica of the split form: it has the weights, and computes for all preparers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import anyio
import anyio.to_thread
import ray
from ray import serve

from staged_pool.api.process_memory import release_memory_of_loading, tune_garbage_collector
from staged_pool.ray.door import Door, open_door
from staged_pool.ray.object_store import Received
from staged_pool.ray.options import LEAD_S
from staged_pool.ray.process import begin
from staged_pool.ray.scaling import TOKENS
from staged_pool.ray.settings import Settings
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.front_desk import FrontDesk
from staged_pool.runtime.engine.host_loop import OwnTask
from staged_pool.runtime.engine.open import governor_for
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.remote.line import BEAT_S
from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.log import get_logger

_Opener: TypeAlias = Callable[[Sequence[EngineConfig], MemoryGovernor], AbstractAsyncContextManager[FrontDesk]]

log = get_logger("staged_pool.ray")


class EngineReplica:
    """The engines of one replica, which compute for all preparers. It has no HTTP.

    Args:
        settings: Settings of the models.
    """

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it
        self._settings = begin(settings)
        self._desk: FrontDesk
        self._received = Received()
        self._run = OwnTask(self._running, "The engine replica")
        self._door: Door = await self._run.__aenter__()

    async def __del__(self) -> None:
        """Finish the requests that preparers have sent, and end. Serve calls it."""
        await self._run.__aexit__(None, None, None)

    async def door(self) -> tuple[Any, ...]:
        """Return the address of this replica, for preparers."""
        return tuple(self._door)

    async def report(self) -> dict[str, Any]:
        """Return what this replica does now, for operators and tests."""
        statistics = [engine.statistics() for engine in self._desk.engines]
        return {
            "replica": self._door.replica,
            "requests": sum(each.admission.requests for each in statistics),
            "items": sum(each.device.items for each in statistics),
            "stored_blocks": self._received.blocks,
            "stored_bytes": self._received.bytes,
        }

    async def check_health(self) -> None:
        """Check that all engines take requests; Serve replaces a replica that fails this three times.

        Raises:
            RuntimeError: Names the model and the reason.
        """
        for engine in self._desk.engines:
            if engine.fault is not None:
                raise RuntimeError(f"{engine.model.card.name}: {engine.fault}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the tokens in flight, for the policy of `by_tokens`."""
        return {TOKENS: sum(engine.admission.statistics().tokens for engine in self._desk.engines)}

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[Door]:
        models = self._settings.models
        memory = governor_for(models[0])
        with single_errors():
            async with anyio.create_task_group() as background:
                await anyio.to_thread.run_sync(memory.measure)
                background.start_soon(memory.watch)
                open_desk = await anyio.to_thread.run_sync(_opener)
                async with open_desk(models, memory) as self._desk:
                    tune_garbage_collector()
                    await anyio.to_thread.run_sync(release_memory_of_loading)
                    background.start_soon(_tell_states, self._desk)
                    name, host = serve.get_replica_context().replica_tag, ray.util.get_node_ip_address()
                    async with open_door(self._desk, host, name, self._received) as door:
                        log.info("engine.ready", replica=name, port=door.port)
                        yield door
                        await anyio.sleep(LEAD_S)
                        await self._desk.drain(models[0].drain_timeout_s)
                background.cancel_scope.cancel()


def _opener() -> _Opener:
    from staged_pool.runtime.engine.open_desk import open_desk  # imports torch, which preparers never do

    return open_desk


async def _tell_states(desk: FrontDesk) -> None:
    while True:
        desk.tell_states()
        await anyio.sleep(BEAT_S)
