"""Runs worlds of pipelines: nothing may be lost, late, rejected inside or left behind."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

from staged_pool import (
    DeadlineExceeded,
    Engine,
    EngineConfig,
    EngineStopped,
    ModelFailed,
    Overloaded,
    Pipeline,
    PipelineItem,
    PipelineStage,
    StagedPoolError,
)
from staged_pool.runtime.engine.run import run_engine
from staged_pool.stages.stage import StageOptions
from tests.sim import clock as virtual
from tests.sim.clock import Backend, Stuck
from tests.sim.pipes.plan import TICK_S, PipeWorld, RequestPlan, StagePlan
from tests.support.cards import EMBEDDER
from tests.support.model import LetterModel

A = TypeVar("A")
T = TypeVar("T")

EPSILON = 1e-6
HANG_S = 600.0
PARTS = 2


class TickOffload:
    """Calls that take some virtual time; a call that has begun runs to its end."""

    def __init__(self, rng: random.Random, ticks: int) -> None:
        self._rng = rng
        self._ticks = ticks

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(self._rng.randint(0, self._ticks) * TICK_S)
            value = function(argument)
        await anyio.lowlevel.checkpoint_if_cancelled()
        return value


class PipeSimulation:
    """One run of a world."""

    def __init__(self, world: PipeWorld) -> None:
        self.world = world
        self.violations: list[str] = []
        self.outcomes: dict[int, str] = {}
        self._rng = random.Random(world.seed)
        self._pipeline: Pipeline | None = None

    async def run(self) -> None:
        """Run the world until each request has its outcome and the engines have ended."""
        with anyio.move_on_after(HANG_S) as hang:
            await self._run()
        if hang.cancelled_caught:
            self.violations.append(
                f"it hangs: {sorted(set(range(len(self.world.requests))) - self.outcomes.keys())} wait"
            )

    async def _run(self) -> None:
        world, clock = self.world, virtual.clock()
        config = EngineConfig(
            max_requests=world.engine_requests, target_delay_s=world.target_delay_s, drain_timeout_s=100.0
        )
        async with AsyncExitStack() as stack:
            engines = []
            for _ in range(2):
                device = TickOffload(self._rng, world.device_ticks)
                engines.append(
                    await stack.enter_async_context(
                        run_engine(
                            config,
                            LetterModel(card=EMBEDDER),
                            device=device,
                            preprocess=TickOffload(self._rng, 1),
                            offload=TickOffload(self._rng, 0),
                            options=StageOptions(clock=clock),
                        )
                    )
                )
            stages = [self._stage(f"s{place}", plan, engines) for place, plan in enumerate(world.stages)]
            self._pipeline = pipeline = Pipeline(
                stages,
                window=world.window,
                max_requests=world.max_requests,
                clock=clock,
                offload=TickOffload(self._rng, 1),
            )
            async with anyio.create_task_group() as tasks:
                for number, plan in enumerate(world.requests):
                    tasks.start_soon(self._ask, number, plan)
                if world.drains_at < math.inf:
                    tasks.start_soon(self._drain)
            self._check_empty(pipeline, engines)

    async def _drain(self) -> None:
        assert self._pipeline is not None
        await anyio.sleep(self.world.drains_at)
        began_at = anyio.current_time()
        await self._pipeline.drain(self.world.drain_s)
        if anyio.current_time() > began_at + self.world.drain_s + EPSILON:
            self.violations.append("a drain took longer than its timeout")

    def _stage(self, name: str, plan: StagePlan, engines: Sequence[Engine]) -> PipelineStage:
        how: dict[str, Any] = {"window": plan.window, "on_error": "skip" if plan.skips else "fail"}

        async def work(text: str) -> Any:
            self._check_windows()
            await anyio.sleep(self._rng.randint(0, plan.ticks) * TICK_S)
            if plan.kind == "expand":
                return [text] * PARTS
            return None if "v" in text else text

        if plan.kind in ("function", "expand"):
            return PipelineStage(name, function=work, source="item", expand=plan.kind == "expand", **how)
        if plan.kind == "best":
            sources = ["request.query", "item"]
            return PipelineStage(name, engine=engines[0], task="score", source=sources, top_k=plan.top_k, **how)
        return PipelineStage(name, engine=engines[plan.kind == "other"], source="item", **how)

    async def _ask(self, number: int, plan: RequestPlan) -> None:
        await anyio.sleep(plan.arrives_at)
        found: int | StagedPoolError | None = None
        with anyio.CancelScope(deadline=plan.leaves_at):
            try:
                found = await self._submit(plan)
            except StagedPoolError as error:
                found = error
        now = anyio.current_time()
        if now > min(plan.leaves_at, plan.arrives_at + plan.timeout_s) + EPSILON:
            self.violations.append(f"request {number} had to wait until {now:g} s")
        self.outcomes[number] = (
            "left" if found is None else "answered" if isinstance(found, int) else type(found).__name__
        )
        if wrong := self._wrong(plan, found):
            self.violations.append(f"request {number}: {found!r}: {wrong}")

    async def _submit(self, plan: RequestPlan) -> int:
        """Return the number of items of the answer."""
        assert self._pipeline is not None
        how: dict[str, Any] = {
            "timeout_s": plan.timeout_s, "priority": "bulk" if plan.bulk else "interactive", "tenant": plan.tenant,
        }  # fmt: skip
        data = {"query": "q", "data": plan.items}
        if not plan.streams:
            return len((await self._pipeline.submit(data, **how)).items)
        async with self._pipeline.stream(data, **how) as outcomes:
            return len([outcome async for outcome in outcomes if isinstance(outcome, PipelineItem)])

    def _wrong(self, plan: RequestPlan, found: int | StagedPoolError | None) -> str | None:
        """Explain a wrong outcome; None if it is right."""
        now, world = anyio.current_time(), self.world
        expected = self._expected(plan)
        match found:
            case None:
                return None if now >= plan.leaves_at - EPSILON else "it has not left"
            case int():
                return None if found == expected else f"{expected} items were expected"
            case DeadlineExceeded():
                return None if plan.timeout_s < math.inf else "it has no deadline"
            case Overloaded():
                return None if "pipeline" in str(found) else "an engine rejects inside"
            case EngineStopped():
                return None if now >= world.drains_at - EPSILON else "nothing was stopped"
            case ModelFailed():
                return None if expected is None else "no item of it fails"
        return "never expected"

    def _expected(self, plan: RequestPlan) -> int | None:
        """Return the number of items of the answer; None if the request fails."""
        items = list(plan.items)
        for stage in self.world.stages:
            if stage.kind in ("one", "other", "best"):
                healthy = [text for text in items if "NaN" not in text]
                if len(healthy) < len(items) and not stage.skips:
                    return None
                items = healthy[: stage.top_k] if stage.kind == "best" else healthy
            elif stage.kind == "function":
                items = [text for text in items if "v" not in text]
            else:
                items = [text for text in items for _ in range(PARTS)]
        return len(items)

    def _check_windows(self) -> None:
        assert self._pipeline is not None
        statistics = self._pipeline.statistics()
        windows = [(statistics.in_flight, statistics.window)]
        windows += [(stage.in_flight, stage.window) for stage in statistics.stages]
        for in_flight, window in windows:
            if in_flight > window:
                self.violations.append(f"{in_flight} items are in a window of {window}")

    def _check_empty(self, pipeline: Pipeline, engines: Sequence[Engine]) -> None:
        left = pipeline.statistics()
        if (
            left.requests
            or left.in_flight
            or left.waiting
            or any(each.in_flight or each.waiting for each in left.stages)
        ):
            self.violations.append(
                f"the pipeline is empty, and counts {left.requests} requests, {left.in_flight} items"
            )
        for engine in engines:
            admission = engine.statistics().admission
            if admission.requests or admission.tokens or engine._entrance.waiting:
                self.violations.append("an engine is empty, and counts something")
            if refused := {limit for limit in admission.refused if limit != "deadline"}:
                self.violations.append(f"an engine rejected by {refused}")


def run_pipes(world: PipeWorld, backend: Backend) -> PipeSimulation:
    """Run one world. Call it inside `prepared()`."""
    simulation = PipeSimulation(world)
    try:
        simulation.violations += virtual.run(simulation.run, backend=backend, seed=world.seed)
    except (Exception, Stuck) as error:  # noqa: BLE001  # a violation like any other
        simulation.violations.append(f"the program ended by {error!r}")
    return simulation
