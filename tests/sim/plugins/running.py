"""Runs worlds of plugins: a bad hook fails its own request, and each request is released once."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import anyio
import anyio.lowlevel

from staged_pool import DeadlineExceeded, Engine, EngineConfig, EngineStopped, InvalidInput, StagedPoolError
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.plugins.block_watch import BlockWatch
from staged_pool.runtime.plugins.host import CLOSE_S, PluginHost
from staged_pool.runtime.plugins.model import PluginModel
from staged_pool.runtime.plugins.processor import PluginContext, Processor
from staged_pool.stages.errors import PluginFailed, TooLarge
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.user_code import as_exception
from tests.sim import clock as virtual
from tests.sim.clock import Backend
from tests.sim.plugins.plan import HOOKS, PLACES, TICK_S, Fault, PluginWorld, RequestPlan, draw, from_json
from tests.sim.running import LOGGED, SLIPS, Report, run_block, slips
from tests.support.user_code import RustPanic, stray_cancellation

A = TypeVar("A")
T = TypeVar("T")

EPSILON = 1e-6
HANG_S = 600.0
NUMBER = "number"
"""Attribute of a context's state: the number of its request."""


class TickThreads:
    """Threads whose calls take some virtual time; a call that has begun runs to its end."""

    def __init__(self, rng: random.Random, ticks: int, limit: int, violations: list[str]) -> None:
        self._rng = rng
        self._ticks = ticks
        self._limiter = anyio.CapacityLimiter(limit)
        self._running = 0
        self._violations = violations

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        async with self._limiter:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(self._rng.randint(0, self._ticks) * TICK_S)
                try:
                    value = function(argument)
                except BaseException as error:  # noqa: BLE001  # as threads do
                    raise as_exception(error) from None
        await anyio.lowlevel.checkpoint_if_cancelled()
        return value


class NoWatch(BlockWatch):
    """A watch without a thread: nothing blocks here."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield


class SimPlugin(Processor):
    """A plugin whose hooks end as the plan of each request says."""

    name = "sim"

    def __init__(self, simulation: PluginSimulation) -> None:
        self._simulation = simulation
        world = simulation.world
        for name in HOOKS:
            setattr(self, name, self._awaited(name) if name in world.awaited else self._plain(name))
        self.cancelled = self._cancelled  # type: ignore[method-assign]

    def _awaited(self, name: str) -> Callable[[Any, PluginContext], Any]:
        async def hook(value: Any, context: PluginContext) -> Any:
            simulation = self._simulation
            number = simulation.begins(name, value, context)
            try:
                await anyio.sleep(simulation.rng.randint(0, simulation.world.ticks) * TICK_S)
                fault = simulation.fault(number, name)
                if fault == "hangs":
                    await anyio.sleep_forever()
                if fault == "strays":
                    await stray_cancellation()
                return simulation.made(name, number, value)
            finally:
                simulation.ends(name, context)

        return hook

    def _plain(self, name: str) -> Callable[[Any, PluginContext], Any]:
        def hook(value: Any, context: PluginContext) -> Any:
            number = self._simulation.begins(name, value, context)
            return self._simulation.made(name, number, value)

        return hook

    def tokens(self, item: Any) -> int | None:
        end(self._simulation.fault(item[0], "tokens"))
        return 1

    def forward(self, batch: Any) -> Any:
        faults = {self._simulation.fault(number, "forward") for number, _ in batch} - {None}
        for fault in faults:
            if fault == "endless":
                return self._simulation.endless(len(batch) + 1)
            end(fault)
        return list(batch)

    async def _cancelled(self, context: PluginContext) -> None:
        self._simulation.was_left(context)
        if self._simulation.world.end_fault == "strays":
            await stray_cancellation()
        end(self._simulation.world.end_fault)

    def release(self, context: PluginContext) -> None:
        self._simulation.released[context.id] += 1
        end(self._simulation.world.end_fault)

    async def aclose(self) -> None:
        end(self._simulation.world.end_fault)


def end(fault: Fault | None) -> None:
    """End plain code with a fault."""
    match fault:
        case "raises":
            raise ValueError("boom")
        case "rejects":
            raise InvalidInput("wrong data")
        case "panics":
            raise RustPanic("boom")
        case "exits":
            raise SystemExit(0)
        case "strays":
            _raise_cancellation()


def _raise_cancellation() -> NoReturn:
    """Raise the cancellation of another event loop, as `asyncio.run` in a thread does."""
    raise asyncio.CancelledError


class PluginSimulation:
    """One run of a world."""

    def __init__(self, world: PluginWorld) -> None:
        self.world = world
        self.violations: list[str] = []
        self.outcomes: dict[int, str] = {}
        self.rng = random.Random(world.seed)
        self.released: Counter[str] = Counter()
        """Calls of `release`, by the id of the request."""
        self._numbers: dict[str, int] = {}
        """Number of each request, by its id."""
        self._contexts: list[PluginContext] = []
        self._left: Counter[str] = Counter()

    # ---- what the hooks ask ----

    def begins(self, hook: str, value: Any, context: PluginContext) -> int:
        """Note the begin of a hook. Returns the number of its request."""
        if hook == "parse":
            self._numbers[context.id] = value
            self._contexts.append(context)
            context.state = {NUMBER: value}
        if self.released[context.id]:
            self.violations.append(f"the hook {hook} begins after the end of its request")
        elif context.state is None or context.state[NUMBER] != self._numbers[context.id]:
            self.violations.append(f"the hook {hook} has the state {context.state}")
        return self._numbers[context.id]

    def ends(self, hook: str, context: PluginContext) -> None:
        """Note the end of an awaited hook."""
        if self.released[context.id]:
            self.violations.append(f"its request is released while the hook {hook} runs")

    def made(self, hook: str, number: int, value: Any) -> Any:
        """Return the result of a hook, or end it with its fault."""
        fault = self.fault(number, hook)
        if hook == "preprocess":
            plan = self.world.requests[number]
            if fault == "endless":
                return self.endless(self.world.max_request_items + 1)
            end(fault)
            return [(number, part) for part in range(plan.parts)]
        end(fault)
        return value

    def fault(self, number: int, place: str) -> Fault | None:
        """Return the fault of a request in a place."""
        return self.world.requests[number].faults.get(place)

    def endless(self, most: int) -> Any:
        """Return a generator without end, of which no more than `most` values may be taken."""
        for taken in itertools.count(1):
            if taken > most:
                self.violations.append(f"{taken} values of a generator are taken, and {most} say that it is too long")
                return
            yield (0, taken)

    def was_left(self, context: PluginContext) -> None:
        """Note a call of `cancelled`."""
        self._left[context.id] += 1

    # ---- the run ----

    async def run(self) -> None:
        """Run the world until each request has its outcome and the engine has ended."""
        with anyio.move_on_after(HANG_S) as hang:
            await self._run()
        if hang.cancelled_caught:
            waiting = sorted(set(range(len(self.world.requests))) - self.outcomes.keys())
            self.violations.append(f"it hangs: {waiting} wait")

    async def _run(self) -> None:
        world = self.world
        config = EngineConfig(
            max_request_items=world.max_request_items,
            preprocess_limit=world.preprocess_limit,
            media_limit=world.media_limit,
            coalesce=False,
            drain_timeout_s=100.0,
            target_delay_s=1000.0,
        )
        plugin = SimPlugin(self)
        leaving = self._threads(config.media_limit)
        host = PluginHost("sim", plugin, config, virtual.clock(), threads=self._threads, leaving=leaving, watch=NoWatch)
        model = PluginModel(host, None, config)
        with anyio.CancelScope(deadline=world.stops_at):
            async with (
                host.running(),
                run_engine(
                    config,
                    model,
                    device=self._threads(1),
                    offload=self._threads(2),
                    options=StageOptions(clock=virtual.clock()),
                ) as engine,
            ):
                engine.plugins = {"sim": engine}
                async with anyio.create_task_group() as clients:
                    for number, plan in enumerate(world.requests):
                        clients.start_soon(self._ask, engine, number, plan)
                await anyio.sleep(2 * CLOSE_S)  # the hooks at the end of the requests are done
                self._check_rest(engine)
                if engine.fault is not None:
                    self.violations.append(f"the engine is broken: {engine.fault}")
        for context in self._contexts:
            if self.released[context.id] != 1:
                self.violations.append(f"a request is released {self.released[context.id]} times")
            if context.state is not None:
                self.violations.append("the state of a request is kept")
            if self._left[context.id] > 1:
                self.violations.append("`cancelled` was called twice")

    def _threads(self, limit: int) -> TickThreads:
        return TickThreads(self.rng, self.world.ticks, limit, self.violations)

    async def _ask(self, engine: Engine, number: int, plan: RequestPlan) -> None:
        await anyio.sleep(plan.arrives_at)
        found: object = None
        with anyio.CancelScope(deadline=plan.leaves_at):
            try:
                found = await engine.process(number, timeout_s=plan.timeout_s)
            except StagedPoolError as error:
                found = error
        now = anyio.current_time()
        if now > min(plan.leaves_at, plan.arrives_at + plan.timeout_s) + EPSILON:
            self.violations.append(f"request {number} had to wait until {now:g} s")
        kind = "left" if found is None else type(found).__name__
        self.outcomes[number] = "answered" if isinstance(found, list) else kind
        if wrong := self._wrong(number, plan, found):
            self.violations.append(f"request {number}: {found!r}: {wrong}")

    def _wrong(self, number: int, plan: RequestPlan, found: object) -> str | None:
        """Explain a wrong outcome; None if it is right."""
        now, place = anyio.current_time(), next((each for each in PLACES if self._happens(plan, each)), None)
        fault = None if place is None else plan.faults[place]
        match found:
            case None:
                return None if now >= plan.leaves_at - EPSILON else "it has not left"
            case list():
                right = [(number, part) for part in range(plan.parts)]
                return None if place is None and found == right else f"{fault} in {place} was expected, or {right}"
            case DeadlineExceeded():
                return None if plan.timeout_s < math.inf else "it has no deadline"
            case EngineStopped():
                return None if now >= self.world.stops_at - EPSILON else "nothing was stopped"
            case TooLarge():
                return None if (place, fault) == ("preprocess", "endless") else "its inputs are few enough"
            case PluginFailed():
                hook = "preprocess" if place == "tokens" else place
                right_fault = fault not in (None, "rejects", "hangs")
                return None if found.hook == hook and right_fault else f"{fault} in {place} was expected"
            case InvalidInput():
                return None if fault == "rejects" else "no hook rejects it"
        return "never expected"

    def _happens(self, plan: RequestPlan, place: str) -> bool:
        return place in plan.faults and (plan.parts > 0 or place not in ("tokens", "forward"))

    def _check_rest(self, engine: Engine) -> None:
        statistics = engine.statistics()
        admission, plugin = statistics.admission, statistics.plugin
        assert plugin is not None
        counts = {
            "requests": admission.requests,
            "tokens": admission.tokens,
            "open requests of the plugin": plugin.open,
            "requests in load": plugin.loading,
            "running hooks": sum(plugin.running.values()),
        }
        self.violations += [
            f"all is at rest, and {count} {what} are counted" for what, count in counts.items() if count
        ]


def run_plugins(world: PluginWorld, backend: Backend) -> Report:
    """Run one world. Call it inside `prepared()`."""
    simulations: list[PluginSimulation] = []

    async def main() -> None:
        simulations.append(PluginSimulation(world))
        await simulations[0].run()

    violations: list[str] = []
    LOGGED.clear()
    SLIPS.clear()
    try:
        violations += [f"never retrieved: {error}" for error in virtual.run(main, backend=backend, seed=world.seed)]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # a violation like any other
        SLIPS.extend(slips(error))
        violations.append(f"the program ended by {error!r}, {error.__cause__!r}")
    violations += [f"a slip: {slip}" for slip, _ in SLIPS]
    if lost := LOGGED["stage.lost_request"]:
        violations.append(f"custody was left with {lost} forgotten hand-overs")
    if crashes := LOGGED["stage.worker_crashed"]:
        violations.append(f"{crashes} workers crashed by a hook")
    own_errors = tuple(slip for slip, is_of_a_mutant in SLIPS if is_of_a_mutant)
    outcomes = Counter(simulations[0].outcomes.values()) if simulations else Counter[str]()
    found = simulations[0].violations if simulations else []
    return Report(world.seed, backend, (*found, *violations), (), outcomes, own_errors)


def run_plugins_json(given: Any, backend: Backend) -> Report:
    """Run the world that a JSON value describes."""
    return run_plugins(from_json(given), backend)


def run_plugins_block(block: tuple[Sequence[int], Backend]) -> tuple[int, list[Report], Counter[str]]:
    """Run a block of seeds, as `tests.sim.running.run_block` does."""
    return run_block(block, lambda seed, backend: run_plugins(draw(seed), backend))
