"""Runs worlds of fronts: each request has one right outcome, and both accounts are empty at the end."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import anyio
import anyio.lowlevel
import numpy as np

from staged_pool import DeadlineExceeded, Engine, EngineConfig, EngineStopped, ModelFailed, Overloaded, StagedPoolError
from staged_pool.runtime.engine.device_engine import DeviceEngine
from staged_pool.runtime.engine.front_desk import FrontDesk
from staged_pool.runtime.engine.lanes import LaneParts, lane_service_time
from staged_pool.runtime.engine.open_front import run_front_engine
from staged_pool.runtime.memory.governor import UNLIMITED_BYTES, MemoryGovernor
from staged_pool.runtime.payloads import Payload, PreparedImage, Row
from staged_pool.runtime.remote import port
from staged_pool.runtime.remote.line import FrontLine
from staged_pool.runtime.remote.port import Rings
from staged_pool.runtime.requests import EmbedRequest, Image, TextInput
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.ring import open_memory
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.stage import StageOptions
from tests.servers.fronts import terms_of
from tests.sim import clock as virtual
from tests.sim.clock import Backend, Stuck
from tests.sim.lines.liar import Liar
from tests.sim.lines.plan import TICK_S, EndPlan, LiarPlan, LineWorld, RequestPlan, draw, from_json
from tests.sim.lines.wire import SimStream, joined
from tests.sim.running import LOGGED, SLIPS, Report, run_block, slips
from tests.support.cards import BOTH_LANES
from tests.support.model import LetterModel, expected

A = TypeVar("A")
T = TypeVar("T")

EPSILON = 1e-6
HANG_S = 60.0
SAMPLE_S = 0.005
LARGE_BYTES = 40_000
REST_S = 0.5
"""Seconds in which everything that is on its way arrives."""

ENDS = ("the peer closed it", "the peer ended within a frame", "the peer ended", "it was closed")
"""Reasons for the end of a line in which nothing wrong was sent."""


class TickOffload:
    """Calls that take some virtual time; a call that has begun runs to its end."""

    def __init__(self, rng: random.Random, ticks: int) -> None:
        self._rng = rng
        self._ticks = ticks

    async def __call__(self, function: Any, argument: Any, /) -> Any:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(self._rng.randint(0, self._ticks) * TICK_S)
            value = function(argument)
        await anyio.lowlevel.checkpoint_if_cancelled()
        return value


class KernelModel(LetterModel):
    """A model that notes what a kernel would read behind an array."""

    def __init__(self, violations: list[str]) -> None:
        super().__init__(card=BOTH_LANES)
        self._violations = violations

    def forward(self, payloads: Sequence[Payload], at_once: int = 1, /) -> list[Row | ModelFailed]:
        self._violations += [f"a kernel gets {payload}" for payload in payloads if not _is_readable(payload)]
        return super().forward(payloads, at_once)


def _is_readable(payload: Payload) -> bool:
    if isinstance(payload, PreparedImage):
        return 0 < payload.tokens <= payload.pixels.values.size
    tokens, kept, chunks = len(payload.ids), payload.kept or (), payload.chunks
    return (
        0 < tokens <= BOTH_LANES.max_tokens
        and all(0 <= token < BOTH_LANES.vocabulary for token in payload.ids)
        and all(0 <= place < tokens for place in kept)
        and (chunks is None or (sum(chunks) == tokens and min(chunks) > 0))
        and 0 <= payload.unseen_tokens < tokens
        and not payload.images
    )


class SimFront:
    """A front of a world, and its present line."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.line = FrontLine(virtual.clock())
        self.engine: Engine | None = None
        self.is_open = anyio.Event()
        self.stream: SimStream | None = None
        self.scope = anyio.CancelScope()
        self.died = anyio.Event()

    @property
    def is_dead(self) -> bool:
        return self.died.is_set()


class LineSimulation:
    """One run of a world."""

    def __init__(self, world: LineWorld) -> None:
        self.world = world
        self.violations: list[str] = []
        self.outcomes: dict[int, str] = {}
        self._rng = random.Random(world.seed)
        self._over = anyio.Event()
        self._asked = anyio.Event()
        """Set once each request has its outcome."""
        self._desk: FrontDesk | None = None
        self._device: DeviceEngine | None = None
        self._process: anyio.CancelScope | None = None
        self._ended_at = math.inf
        """Time of the first end of a line."""
        self._config = EngineConfig(
            max_requests=world.max_requests,
            channel_capacity=world.channel_capacity,
            waiting_tokens=world.waiting_tokens,
            max_batch_items=world.max_batch_items,
            coalesce=world.coalesce,
            result_cache_mb=int(world.result_cache),
            chunk_items=4,
            preprocess_limit=2,
            image_preprocess_limit=2,
            target_delay_s=1000.0,
            drain_timeout_s=100.0,
        )
        self._model = KernelModel(self.violations)
        self._terms = terms_of(self._model, self._config)

    async def run(self) -> None:
        """Run the world until each request has its outcome and everything has come to rest."""
        with anyio.move_on_after(HANG_S) as hang:
            await self._run()
        if hang.cancelled_caught:
            left = sorted(set(range(len(self.world.requests))) - self.outcomes.keys())
            self.violations.append(f"it hangs: {left} wait")

    async def _run(self) -> None:
        fronts = [SimFront(number) for number in range(self.world.fronts)]
        async with anyio.create_task_group() as world:
            world.start_soon(self._keep_engine_process)
            for front in fronts:
                world.start_soon(self._keep_front, front)
            for end in self.world.ends:
                world.start_soon(self._end, end, fronts)
            world.start_soon(self._sample, fronts)
            async with anyio.create_task_group() as clients:
                for number, plan in enumerate(self.world.requests):
                    clients.start_soon(self._ask, number, plan, fronts[plan.front])
                for liar in self.world.liars:
                    clients.start_soon(self._lie, liar)
                if self.world.drains_at < math.inf:
                    clients.start_soon(self._drain, fronts[0])
            await anyio.sleep(REST_S)
            for front in fronts:
                front.line.beat()
            if self._desk is not None:
                self._desk.tell_states()
            await anyio.sleep(REST_S)
            self._check_rest(fronts)
            self._over.set()
            world.cancel_scope.cancel()

    # ---- processes ----

    async def _keep_engine_process(self) -> None:
        """Run engine processes, one after the other."""
        while not self._over.is_set():
            with anyio.CancelScope() as self._process:
                await self._run_engine_process()
            self._desk = self._device = None
            await anyio.sleep(self.world.absent_s)

    async def _run_engine_process(self) -> None:
        config, card = self._config, self._model.card
        desk = FrontDesk()
        device = DeviceEngine(
            config,
            self._model,
            lanes={
                lane: LaneParts(
                    device=TickOffload(self._rng, self.world.device_ticks),
                    preprocess=TickOffload(self._rng, 0),
                    service_time=lane_service_time(lane, config, card),
                )
                for lane in card.lanes
            },
            give=partial(desk.give, 0),
            shared_cores=None,
            options=StageOptions(clock=virtual.clock()),
            memory=MemoryGovernor(UNLIMITED_BYTES),
        )
        async with device.running(), anyio.create_task_group() as self._lines:
            desk.add(device, self._terms)
            self._desk, self._device = desk, device
            await self._over.wait()
            self._lines.cancel_scope.cancel()

    async def _keep_front(self, front: SimFront) -> None:
        with front.scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep_line, front)
                await front.line.welcomed.wait()
                async with run_front_engine(
                    self._config,
                    self._model,
                    front.line,
                    preprocess=TickOffload(self._rng, self.world.preprocess_ticks),
                    image_preprocess=TickOffload(self._rng, self.world.preprocess_ticks),
                    offload=TickOffload(self._rng, self.world.preprocess_ticks),
                    options=StageOptions(clock=virtual.clock()),
                ) as front.engine:
                    front.is_open.set()
                    await self._over.wait()
                tasks.cancel_scope.cancel()

    async def _keep_line(self, front: SimFront) -> None:
        """Join a front to the engine process, again and again."""
        while True:
            if self._desk is not None:
                await self._join(front, self._desk)
                self._ended_at = min(self._ended_at, anyio.current_time())
            await anyio.sleep(max(self.world.absent_s, TICK_S))

    async def _join(self, front: SimFront, desk: FrontDesk) -> None:
        ours, theirs = joined(self._rng, self.world)
        front.stream = ours
        memory = [open_memory(self.world.ring_bytes) for _ in range(2)] if self.world.ring_bytes else []
        serving = partial(desk.serve, theirs, Rings.mapped(*map(os.dup, memory[::-1])) if memory else None)
        self._lines.start_soon(self._note_reason, serving)
        try:
            await self._note_reason(partial(front.line.run, ours, Rings.mapped(*memory) if memory else None))
        finally:
            ours.cut()

    async def _note_reason(self, serve: Any, is_of_a_liar: bool = False) -> None:
        reason = await serve()
        if reason not in ENDS and (not is_of_a_liar or "crashed" in reason):
            self.violations.append(f"a line ended: {reason}")

    async def _lie(self, plan: LiarPlan) -> None:
        """Join a front that lies to the engine process, once."""
        await anyio.sleep(plan.at)
        if self._desk is None:
            return
        ours, theirs = joined(self._rng, self.world)
        memory = [open_memory(self.world.ring_bytes) for _ in range(2)] if self.world.ring_bytes else []
        serving = partial(self._desk.serve, theirs, Rings.mapped(*memory) if memory else None)
        self._lines.start_soon(self._note_reason, serving, True)
        try:
            await Liar(plan).run(ours)
        finally:
            ours.cut()

    async def _end(self, end: EndPlan, fronts: Sequence[SimFront]) -> None:
        await anyio.sleep(end.at)
        self._ended_at = min(self._ended_at, anyio.current_time())
        for front in fronts:
            if end.front in (None, front.number) and front.stream is not None:
                front.stream.cut()
        if end.front is None and self._process is not None:
            self._desk = self._device = None
            self._process.cancel()
        if end.dies and end.front is not None:
            fronts[end.front].died.set()
            fronts[end.front].scope.cancel()

    async def _drain(self, front: SimFront) -> None:
        await anyio.sleep(self.world.drains_at)
        if front.engine is not None and not front.is_dead:
            await front.engine.drain(HANG_S / 2)

    # ---- clients ----

    async def _ask(self, number: int, plan: RequestPlan, front: SimFront) -> None:
        await anyio.sleep(plan.arrives_at)
        found: Any = None
        with anyio.CancelScope(deadline=plan.leaves_at) as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._leave_with, front, scope)
                await front.is_open.wait()
                began_at = anyio.current_time()
                try:
                    found = await self._submit(plan, front)
                except StagedPoolError as error:
                    found = error
                tasks.cancel_scope.cancel()
        dead = front.is_dead
        now = anyio.current_time()
        self.outcomes[number] = (
            "died" if dead and found is None
            else "left" if found is None
            else type(found).__name__ if isinstance(found, StagedPoolError) else "answered"
        )  # fmt: skip
        if dead:
            return
        # An error of a stream comes behind the running call that takes a result.
        slack_s = EPSILON + plan.streams * 2 * self.world.preprocess_ticks * TICK_S
        if found is not None and now > began_at + plan.timeout_s + slack_s:
            self.violations.append(f"request {number} had to wait for {now - began_at:g} s: {found!r}")
        if wrong := self._wrong(plan, found):
            self.violations.append(f"request {number}: {found!r}: {wrong}")

    async def _leave_with(self, front: SimFront, scope: anyio.CancelScope) -> None:
        """Cancel a caller whose process dies."""
        await front.died.wait()
        scope.cancel()

    async def _submit(self, plan: RequestPlan, front: SimFront) -> Any:
        """Return the vectors of a request."""
        engine = front.engine
        assert engine is not None
        inputs = tuple(Image(text.encode()) if plan.images else TextInput(text) for text in plan.items)
        request = EmbedRequest(inputs=inputs, normalize=False)
        how: dict[str, Any] = {
            "timeout_s": plan.timeout_s, "priority": Priority.BULK if plan.bulk else Priority.INTERACTIVE,
            "tenant": plan.tenant, "body_bytes": LARGE_BYTES if plan.is_large else sum(map(len, plan.items)),
        }  # fmt: skip
        if not plan.streams:
            return (await engine.submit(lambda: request, lambda made: made, waits=plan.waits, **how)).dense
        vectors: dict[int, Any] = {}

        async def take(some: Any) -> None:
            await anyio.lowlevel.checkpoint()
            for place, vector in zip(*some, strict=True):
                if place in vectors:
                    self.violations.append("a row came twice")
                vectors[place] = vector

        await engine.stream(lambda: request, lambda places, made: (places, made.dense), take, **how)
        return [vectors[place] for place in range(len(inputs))]

    def _wrong(self, plan: RequestPlan, found: Any) -> str | None:
        """Explain a wrong outcome; None if it is right."""
        now, world = anyio.current_time(), self.world
        match found:
            case None:
                return None if now >= plan.leaves_at - EPSILON else "it has not left"
            case DeadlineExceeded():
                return None if plan.timeout_s < math.inf else "it has no deadline"
            case Overloaded():
                return (
                    "it waits"
                    if plan.waits and not plan.streams
                    else None
                    if world.max_requests < 64 or world.liars
                    else "there is room"
                )
            case EngineStopped():
                has_stopped = now >= min(self._ended_at, world.drains_at) - EPSILON
                return None if has_stopped and found.retry_after_s > 0 else "nothing was stopped"
            case ModelFailed():
                return None if self._is_at(found.index, plan, "NaN") else "that input does not fail"
            case InvalidInput():
                named = self._is_at(found.index, plan, "") and found.param == "input"
                return None if named else "that input is valid"
            case StagedPoolError():
                return "never expected"
        if not all(text and "NaN" not in text for text in plan.items):
            return "an input of it fails"
        right = [expected(text) for text in plan.items]
        return None if np.array_equal(np.array(found), np.array(right)) else f"{right} was expected"

    def _is_at(self, index: int | None, plan: RequestPlan, text: str) -> bool:
        return (plan.items[index] if index is not None else plan.items[0]) == text

    # ---- invariants ----

    async def _sample(self, fronts: Sequence[SimFront]) -> None:
        """Look at each tick for more lists on their way than credits."""
        while True:
            for front in fronts:
                for model in front.line.models:
                    for stage in model._lanes.values():
                        if (out := stage.credit._contents.messages) > self._config.channel_capacity:
                            self.violations.append(f"{out} lists of a front are on their way")
            await anyio.sleep(SAMPLE_S)

    def _check_rest(self, fronts: Sequence[SimFront]) -> None:
        """Check that nothing is counted once all requests have their outcome."""
        found: Counter[str] = Counter()
        device, desk = self._device, self._desk
        if device is None or desk is None:
            self.violations.append("there is no engine process")
            return
        admission = device.statistics().admission
        found["requests in the engine process"] = admission.requests + len(device.requests.open)
        found["tokens in the engine process"] = admission.tokens + round(sum(device.admission.in_flight.fed.values()))
        found["requests that wait to enter"] = device.entrance.waiting
        for preparing in device.stages.preparing.values():
            found["reports of fronts that are gone"] += len(preparing.reports.keys() - desk._fronts)
        for end in desk._fronts:
            found["requests of a front"] += len(end._tickets) + len(end._entering)
            found["lists in front of the batch stage"] += sum(inbox.waiting for inbox in end._inboxes.values())
        if len(desk._fronts) != sum(not front.is_dead for front in fronts):
            self.violations.append(f"{len(desk._fronts)} fronts have a line")
        for front in fronts:
            if not front.is_dead:
                self._count_of(front, found)
        self.violations += [f"all is at rest, and {count} {what} are counted" for what, count in found.items() if count]

    def _count_of(self, front: SimFront, found: Counter[str]) -> None:
        line, engine = front.line, front.engine
        assert engine is not None
        admission = engine.statistics().admission
        found["requests in a front"] += admission.requests + len(line._requests) + len(line._asked)
        found["tokens in a front"] += admission.tokens + round(sum(engine._admission.in_flight.fed.values()))
        for model in line.models:
            found["numbers of requests"] += len(model._numbers)
            for stage in model._lanes.values():
                found["items of a front"] += stage.waiting + stage.pending_tokens
                found["credits"] += stage.credit.waiting
        line.beat()
        if line._port is not None and line._port._writer is not None:
            found["bytes in a ring"] += line._port._writer.used_bytes


@contextmanager
def small_arrays_in_rings() -> Iterator[None]:
    """Let arrays of any size go through rings, which else only large ones do."""
    with mock.patch.object(port, "IN_FRAME_BYTES", 0):
        yield


def run_lines(world: LineWorld, backend: Backend) -> Report:
    """Run one world. Call it inside `prepared()`."""
    simulations: list[LineSimulation] = []

    async def main() -> None:
        simulations.append(LineSimulation(world))
        await simulations[0].run()

    violations: list[str] = []
    LOGGED.clear()
    SLIPS.clear()
    with small_arrays_in_rings():
        try:
            violations += [f"never retrieved: {error}" for error in virtual.run(main, backend=backend, seed=world.seed)]
        except (Exception, Stuck) as error:  # noqa: BLE001  # a violation like any other
            SLIPS.extend(slips(error))
            violations.append(f"the program ended by {error!r}, {error.__cause__!r}")
    violations += [f"a slip: {slip}" for slip, _ in SLIPS]
    if lost := LOGGED["stage.lost_request"]:
        violations.append(f"custody was left with {lost} forgotten hand-overs")
    own_errors = tuple(slip for slip, is_of_a_mutant in SLIPS if is_of_a_mutant)
    outcomes = Counter(simulations[0].outcomes.values()) if simulations else Counter[str]()
    found = simulations[0].violations if simulations else []
    return Report(world.seed, backend, (*found, *violations), (), outcomes, own_errors)


def run_lines_json(given: Any, backend: Backend) -> Report:
    """Run the world that a JSON value describes."""
    return run_lines(from_json(given), backend)


def run_lines_block(block: tuple[Sequence[int], Backend]) -> tuple[int, list[Report], Counter[str]]:
    """Run a block of seeds, as `tests.sim.running.run_block` does."""
    return run_block(block, lambda seed, backend: run_lines(draw(seed), backend))
