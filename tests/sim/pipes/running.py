"""Runs worlds of pipelines: nothing may be lost, late, rejected inside or left behind."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, nullcontext
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

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
    StageFailed,
    TooLarge,
)
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.pipelines.window import Window
from staged_pool.stages.scheduling.entries import Claim, Priority
from staged_pool.stages.stage import StageOptions
from tests.sim import clock as virtual
from tests.sim.clock import Backend
from tests.sim.pipes.plan import (
    FUNCTION_FAULTS,
    GENERATOR_FAULTS,
    HANGS,
    TICK_S,
    PipeWorld,
    RequestPlan,
    StagePlan,
    draw,
    from_json,
)
from tests.sim.running import Report, run_block
from tests.support.cards import EMBEDDER
from tests.support.model import LetterModel
from tests.support.user_code import STRAY_CANCELLATION, BadEnd, RustPanic

A = TypeVar("A")
T = TypeVar("T")

EPSILON = 1e-6
HANG_S = 600.0
HANGING_S = 5.0
"""Seconds for which a plain function hangs."""
FUNCTION_THREADS = 2

BAD_ENDS = {
    "strays": STRAY_CANCELLATION,
    "panics": BadEnd("RustPanic", lambda: RustPanic("a panic")),
    "exits": BadEnd("SystemExit", lambda: SystemExit(3)),
}
"""Ends of user code that are no `Exception`, by name."""


class SourceError(Exception):
    """The own error of a caller's generator."""


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


class FunctionThreads:
    """Threads of plain functions, which can be left, like those of a pipeline."""

    def __init__(self, rng: random.Random, ticks: int, tasks: TaskGroup) -> None:
        self._rng = rng
        self._ticks = ticks
        self._tasks = tasks
        self._places = anyio.CapacityLimiter(FUNCTION_THREADS)

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        call, done, outcome = object(), anyio.Event(), list[tuple[T] | BaseException]()
        await self._places.acquire_on_behalf_of(call)

        async def run() -> None:
            hangs = isinstance(argument, Sequence) and HANGS in argument
            await anyio.sleep(HANGING_S if hangs else self._rng.randint(0, self._ticks) * TICK_S)
            try:
                outcome.append((function(argument),))
            except BaseException as error:  # noqa: BLE001  # raised again in the task that waits
                outcome.append(error)
            self._places.release_on_behalf_of(call)
            done.set()

        self._tasks.start_soon(run)
        await done.wait()
        if isinstance(kept := outcome.pop(), BaseException):
            raise kept
        return kept[0]


class FairWindow:
    """Watches the window of a pipeline: what waits is passed by others a few times only.

    Args:
        window: The window. Its method `enter` is watched from now on.
        fail: Called with each violation.
        requests: Requests of the world.
    """

    def __init__(self, window: Window, fail: Callable[[str], object], requests: Sequence[RequestPlan]) -> None:
        self._enter = window.enter
        self._fail = fail
        self._window = window
        self._requests = requests
        self._passed: dict[Claim, int] = {}
        """Places that others got since a request began to wait, or got its last one."""
        self._waits: Counter[Claim] = Counter()
        window.enter = self.enter  # type: ignore[method-assign]

    async def enter(self, claim: Claim) -> None:
        """Take a place; see `Window.enter`."""
        if not self._waits[claim]:
            self._passed[claim] = 0
        self._waits[claim] += 1
        try:
            await self._enter(claim)
        finally:
            self._waits[claim] -= 1
        self._passed[claim] = 0
        for other in (other for other, count in self._waits.items() if count and other is not claim):
            self._passed[other] += 1
            if other.priority is Priority.INTERACTIVE and self._passed[other] > (most := self._most(other)):
                self._fail(f"an interactive item was passed {self._passed[other]} times, of {most}")

    def _most(self, claim: Claim) -> int:
        """Return how many places others may get before a request: its fair share comes, but for what begins at once."""
        urgent = [plan for plan in self._requests if not plan.bulk]
        tenants = len({plan.tenant for plan in urgent})
        own = sum(plan.tenant == claim.tenant for plan in urgent)
        return math.ceil((tenants + 1) * (own + 1) * 8 / 7) + self._window.limit


class PipeSimulation:
    """One run of a world."""

    def __init__(self, world: PipeWorld) -> None:
        self.world = world
        self.violations: list[str] = []
        self.outcomes: dict[int, str] = {}
        self._rng = random.Random(world.seed)
        self._pipeline: Pipeline | None = None
        self._read: dict[int, int] = {}
        """Outcomes that the reader of a stream has got, by request."""

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
            threads = await stack.enter_async_context(anyio.create_task_group())
            stages = [self._stage(f"s{place}", plan, engines) for place, plan in enumerate(world.stages)]
            self._pipeline = pipeline = Pipeline(
                stages,
                window=world.window,
                max_requests=world.max_requests,
                clock=clock,
                offload=FunctionThreads(self._rng, 1, threads),
            )
            FairWindow(pipeline._window, self.violations.append, world.requests)
            async with anyio.create_task_group() as tasks:
                for number, plan in enumerate(world.requests):
                    tasks.start_soon(self._ask, number, plan)
                if world.drains_at < math.inf:
                    tasks.start_soon(self._drain)
            if missing := set(range(len(world.requests))) - self.outcomes.keys():
                self.violations.append(f"{sorted(missing)} ended without an outcome")
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

        def made(text: str) -> Any:
            self._check_windows()
            if text in FUNCTION_FAULTS:
                self._fail(text[1:])
            if plan.kind == "expand":
                return self._yielded(text, plan) if text in GENERATOR_FAULTS or plan.plain else [text] * plan.parts
            return None if "v" in text else text

        async def work(text: str) -> Any:
            await anyio.sleep(self._rng.randint(0, plan.ticks) * TICK_S)
            if text == "!strays":
                await STRAY_CANCELLATION.awaited()
            return made(text)

        if plan.kind in ("function", "expand"):
            expands: dict[str, Any] = {"expand": True, "max_items": plan.parts + 1} if plan.kind == "expand" else {}
            return PipelineStage(name, function=made if plan.plain else work, source="item", **expands, **how)
        if plan.kind == "best":
            sources = ["request.query", "item"]
            return PipelineStage(name, engine=engines[0], task="score", source=sources, top_k=plan.top_k, **how)
        return PipelineStage(name, engine=engines[plan.kind == "other"], source="item", **how)

    def _yielded(self, text: str, plan: StagePlan) -> Iterator[str]:
        """Yield the parts of an item, and count those that are taken."""
        for taken in itertools.count(1):
            if taken > plan.parts + 2:
                self.violations.append(f"{taken} parts were taken, of {plan.parts + 1} at most")
            yield text
            if text.startswith("!yields"):
                self._fail(text.rpartition(" ")[2])
            if text != "!endless" and taken == plan.parts:
                return

    @staticmethod
    def _fail(fault: str) -> None:
        if fault == "raises":
            raise SourceError
        BAD_ENDS[fault].called()

    async def _ask(self, number: int, plan: RequestPlan) -> None:
        await anyio.sleep(plan.arrives_at)
        found: int | Exception | None = None
        self._read.pop(number, None)
        with anyio.CancelScope(deadline=plan.leaves_at):
            try:
                found = await self._submit(number, plan)
            except (StagedPoolError, SourceError) as error:
                found = error
        now = anyio.current_time()
        if now > min(plan.leaves_at, plan.arrives_at + plan.timeout_s) + EPSILON:
            self.violations.append(f"request {number} had to wait until {now:g} s")
        self.outcomes[number] = (
            "left" if found is None else "answered" if isinstance(found, int) else type(found).__name__
        )
        if wrong := self._wrong(plan, found) or self._lost(number, plan, found):
            self.violations.append(f"request {number}: {found!r}: {wrong}")

    async def _submit(self, number: int, plan: RequestPlan) -> int:
        """Return the number of items of the answer."""
        assert self._pipeline is not None
        how: dict[str, Any] = {
            "timeout_s": plan.timeout_s, "priority": "bulk" if plan.bulk else "interactive", "tenant": plan.tenant,
        }  # fmt: skip
        sources: dict[str, Callable[[], Any]] = {
            "list": lambda: plan.items,
            "plain": partial(self._plain, plan),
            "awaited": partial(_awaited, plan),
        }
        items = sources[plan.source]()
        data = {"query": "q", "data": items}
        async with aclosing(items) if isinstance(items, AsyncGenerator) else nullcontext():  # the caller's to close
            if not plan.streams:
                return len((await self._pipeline.submit(data, **how)).items)
            async with self._pipeline.stream(data, **how) as outcomes:
                self._read[number] = 0
                async for outcome in outcomes:
                    self._read[number] += isinstance(outcome, PipelineItem)
                return self._read[number]

    def _plain(self, plan: RequestPlan) -> Iterator[str]:
        yield from plan.items
        if plan.source_fault is not None:
            self._fail(plan.source_fault)

    def _wrong(self, plan: RequestPlan, found: int | Exception | None) -> str | None:
        """Explain a wrong outcome; None if it is right."""
        now, world = anyio.current_time(), self.world
        expected, failures = self._expected(plan)
        match found:
            case None:
                return None if now >= plan.leaves_at - EPSILON else "it has not left"
            case int():
                return None if found == expected and not failures else f"{expected} items were expected, or {failures}"
            case DeadlineExceeded():
                return None if plan.timeout_s < math.inf else "it has no deadline"
            case Overloaded():
                return None if "pipeline" in str(found) else "an engine rejects inside"
            case EngineStopped():
                return None if now >= world.drains_at - EPSILON else "nothing was stopped"
            case StageFailed(stage="source"):
                end = BAD_ENDS.get(plan.source_fault or "")
                return None if end is not None and end.kind in str(found) else "its source is well"
            case SourceError():
                return None if plan.source_fault == "raises" else "it is of no source"
            case Exception():
                return None if type(found) in failures else f"only {failures} were expected"

    def _lost(self, number: int, plan: RequestPlan, found: int | Exception | None) -> str | None:
        """Explain the loss of a reader by an error of its source."""
        ended_by_source = isinstance(found, SourceError) or (isinstance(found, StageFailed) and found.stage == "source")
        expected, failures = self._expected(plan)
        if not (plan.streams and ended_by_source) or len(failures) > 1 or "best" in {s.kind for s in self.world.stages}:
            return None
        return None if self._read[number] == expected else f"{self._read[number]} of {expected} outcomes were read"

    def _expected(self, plan: RequestPlan) -> tuple[int, set[type[Exception]]]:
        """Return the number of items of the answer, and the errors that must come instead."""
        items = list(plan.items)
        failures: set[type[Exception]] = set()
        for stage in self.world.stages:
            failing: dict[str, type[Exception]] = {}
            if stage.kind in ("one", "other", "best"):
                failing = {text: ModelFailed for text in items if "NaN" in text}
            else:
                failing = dict.fromkeys(FUNCTION_FAULTS, StageFailed)
            if stage.kind == "expand":
                failing |= {text: TooLarge if text == "!endless" else StageFailed for text in GENERATOR_FAULTS}
            if not stage.skips:
                failures |= {failing[text] for text in items if text in failing}
            items = [text for text in items if text not in failing]
            if stage.kind == "best":
                items = items[: stage.top_k]
            elif stage.kind == "function":
                items = [text for text in items if "v" not in text]
            elif stage.kind == "expand":
                items = [text for text in items for _ in range(stage.parts)]
        if plan.source_fault is not None:
            failures.add(SourceError)
        return len(items), failures

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


async def _awaited(plan: RequestPlan) -> AsyncGenerator[str, None]:
    for text in plan.items:
        await anyio.sleep(TICK_S / 2)
        yield text
    if plan.source_fault == "raises":
        raise SourceError
    if plan.source_fault is not None:
        await BAD_ENDS[plan.source_fault].awaited()


def run_pipes(world: PipeWorld, backend: Backend) -> PipeSimulation:
    """Run one world. Call it inside `prepared()`."""
    simulation = PipeSimulation(world)
    try:
        simulation.violations += virtual.run(simulation.run, backend=backend, seed=world.seed)
    except BaseException as error:  # a violation like any other: whatever ends the host does
        if isinstance(error, KeyboardInterrupt):
            raise
        simulation.violations.append(f"the program ended by {error!r}")
    return simulation


def run_pipes_json(given: Any, backend: Backend) -> Report:
    """Run the world that a JSON value describes."""
    return run_pipes_world(from_json(given), backend)


def run_pipes_seed(seed: int, backend: Backend) -> Report:
    """Run the world of a seed."""
    return run_pipes_world(draw(seed), backend)


def run_pipes_world(world: PipeWorld, backend: Backend) -> Report:
    """Run one world. Call it inside `prepared()`."""
    simulation = run_pipes(world, backend)
    outcomes = Counter(simulation.outcomes.values())
    return Report(world.seed, backend, tuple(simulation.violations), (), outcomes)


def run_pipes_block(block: tuple[Sequence[int], Backend]) -> tuple[int, list[Report], Counter[str]]:
    """Run several seeds; see `run_block`."""
    return run_block(block, run_pipes_seed)
