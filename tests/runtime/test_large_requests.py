"""A single text beside a hundred large requests: counted in calls and batches that go before it, not in seconds."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager, suppress

import anyio
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.errors import EngineStopped, Overloaded
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

REQUESTS = 100
TEXTS = 250
BEFORE = 20 * REQUESTS
"""Texts of theirs that go through the device before it is held: none of them is a newcomer any more."""


class Held(LetterModel):
    """Model whose batches wait for `let_go` after a number of texts went through the device."""

    def __init__(self) -> None:
        super().__init__(on_forward=self._hold)
        self.is_held = False
        self._left = BEFORE
        self._let_go = threading.Semaphore(0)

    def _hold(self, texts: Sequence[str]) -> None:
        self._left -= len(texts)
        if self._left < 0:
            self.is_held = True
            assert self._let_go.acquire(timeout=60)

    def let_go(self, batches: int = 1) -> None:
        self._let_go.release(batches)


def is_full(engine: Engine) -> bool:
    """True if all that waits to be fed waits for room; nothing is on its way."""
    statistics, preprocess = engine.statistics(), engine._stages.preprocess["text"]
    on_its_way = statistics.stages[1].waiting + preprocess.calls + engine._stages.channels[2].waiting
    return not on_its_way and statistics.priorities["interactive"].waiting_requests >= REQUESTS


@asynccontextmanager
async def beside_large_requests(
    model: Held, tenant_of: Callable[[int], Hashable]
) -> AsyncIterator[tuple[Engine, anyio.abc.TaskGroup]]:
    """An engine as full of large requests as it gets, whose device is held."""
    config = EngineConfig(waiting_tokens=16_384, max_batch_tokens=128)
    async with DeviceThreads("test device", watchdog_s=config.watchdog_s).running() as device:
        async with run_engine(config, model, device=device) as engine, anyio.create_task_group() as tasks:

            async def ask(number: int) -> None:
                with suppress(EngineStopped):
                    await engine.embed([f"{number:03}.{n:03}" for n in range(TEXTS)], tenant=tenant_of(number))

            for number in range(REQUESTS):
                tasks.start_soon(ask, number)
            try:
                await until(lambda: model.is_held and is_full(engine))
                yield engine, tasks
                tasks.cancel_scope.cancel()
            finally:
                model.let_go(10_000)


def place(calls: Sequence[Sequence[str]], text: str) -> int:
    """Return the place of the call that has a text."""
    return next(place for place, texts in enumerate(calls) if text in texts)


@pytest.mark.parametrize(
    ("tenant_of", "tenant"),
    [
        pytest.param(lambda _: None, None, id="all of no tenant"),
        pytest.param(lambda _: None, "light", id="a tenant beside those of none"),
        pytest.param(lambda _: "heavy", None, id="no tenant beside those of one"),
        pytest.param(lambda number: number, "light", id="a tenant beside a hundred"),
    ],
)
async def test_a_single_text_passes_before_the_next_lists_of_large_requests(
    tenant_of: Callable[[int], Hashable], tenant: Hashable
) -> None:
    model = Held()
    async with beside_large_requests(model, tenant_of) as (engine, tasks):
        calls, batches = len(model.preprocessed), len(model.forwarded)
        tasks.start_soon(lambda: engine.embed("x", tenant=tenant))
        await until(lambda: engine.statistics().stages[0].done == REQUESTS + 1 and is_full(engine))
        while not any("x" in texts for texts in model.forwarded):
            begun = len(model.forwarded)
            model.let_go()
            await until(lambda: len(model.forwarded) > begun and is_full(engine))  # noqa: B023  # it is awaited here
        # In front of preprocess: its channel and threads are full, and a list or two waits for room.
        assert place(model.preprocessed, "x") - calls <= REQUESTS // 10
        # In front of the device: at most a text of each, and what its own preparing takes. A thousand batches wait.
        assert place(model.forwarded, "x") - batches <= REQUESTS // 4


async def test_requests_of_no_tenant_leave_room_to_a_tenant() -> None:
    gate = Gate()
    model = LetterModel()
    config = EngineConfig(max_requests=16)
    async with DeviceThreads("test device", watchdog_s=config.watchdog_s).running() as device:
        async with run_engine(config, model, device=device) as engine, anyio.create_task_group() as tasks:
            await engine.embed("once", tenant="named")
            model.on_forward = gate
            for number in range(14):
                tasks.start_soon(engine.embed, f"text {number}")
            await gate.arrived()
            await until(lambda: engine.statistics().admission.requests == 14)
            with pytest.raises(Overloaded, match="This caller has reached its share of the server's limit"):
                await engine.embed("one more")
            tasks.start_soon(lambda: engine.embed("single", tenant="named"))
            await until(lambda: engine.statistics().admission.requests == 15)
            gate.open()
        assert engine.statistics().admission.refused == {"part": 1}
