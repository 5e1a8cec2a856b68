"""Runs worlds of batches: each line has one right answer, no memory is left, and nobody waits for ever."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast
from unittest import mock

import anyio
import anyio.lowlevel

from staged_pool import Engine, EngineConfig, Overloaded, StagedPoolError, TooLarge
from staged_pool.api.app.batch_work import BatchWork
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.bulk.batch_lines import BatchAnswer, BatchAnswers, BatchLine
from staged_pool.api.bulk.job import Window, run_job
from staged_pool.api.bulk.journal import Journal, State
from staged_pool.api.bulk.ranges import Ranges
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.engine.waiting_engine import WaitingEngine
from staged_pool.runtime.memory.answers import ESTIMATE_ERROR, WRITTEN_NUMBER_BYTES, AnswerMemory
from staged_pool.runtime.memory.budget import ByteAccount
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.requests import EmbedRequest, Output, TextInput
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.stage import StageOptions
from tests.sim import clock as virtual
from tests.sim.batches.plan import TICK_S, BatchWorld, CallerPlan, JobPlan, LinePlan, draw, from_json
from tests.sim.clock import Backend, Stuck
from tests.sim.pipes.running import TickOffload
from tests.sim.running import Report, run_block
from tests.support.cards import EMBEDDER
from tests.support.model import LetterModel

T = TypeVar("T")

HANG_S = 600.0
LETTER_BYTES = 2 * WRITTEN_NUMBER_BYTES
"""Memory of the vector of a letter."""

TRIES = 12
"""Most times that a text is computed: each try of a line has twice the room of the one before."""

HEAD_BYTES = 1000
"""Most bytes of an answer beside its numbers, which are counted once it is written."""

MOST_REJECTIONS = 40
"""Rejections after which a caller gives up. One that asks for little is never driven to that."""

MANY = 64
"""Requests of an engine that rejects for memory alone."""

SMALL = 0.1
"""Share of the memory up to which a caller asks for little."""


class WatchedAccount(ByteAccount):
    """An account that reports when more is held than its limit."""

    def __init__(self, limit_bytes: int, violations: list[str]) -> None:
        super().__init__(limit_bytes)
        self._violations = violations

    def _add(self, count: int, party: Hashable) -> None:
        super()._add(count, party)
        if count > 0 and self.held_bytes > self.limit_bytes + HEAD_BYTES * max(1, len(self._parties)):
            self._violations.append(f"{self.held_bytes} bytes are held, of {self.limit_bytes}")
        if self.held_bytes < 0 or min(self._parties.values(), default=0) < 0:
            self._violations.append("less than nothing is held")


class MemoryFiles:
    """The input, the output and the journal of a job, in memory.

    Args:
        lines: The input.
        writing_ticks: Most ticks of a write.
    """

    published = False
    read_share = 0.0

    def __init__(self, lines: Sequence[BatchLine], writing_ticks: int) -> None:
        self.writing_ticks = writing_ticks
        self._unread = list(lines)
        self.done = Ranges()
        self.failed = 0
        self.written: list[BatchAnswer] = []

    def read(self) -> Sequence[BatchLine]:
        lines, self._unread = self._unread[:3], self._unread[3:]
        return lines

    def write(self, answers: Sequence[BatchAnswer]) -> None:
        self.written += answers

    def sync(self) -> State:
        return {}

    def complete(self, lines: int) -> None:
        pass

    def close(self) -> None:
        pass

    def publish(self) -> None:
        self.published = True

    def checkpoint(self, fresh: Ranges, failed: int, state: State) -> None:
        for first, end in fresh:
            self.done.add(first, end)
        self.failed = failed

    def publishing(self) -> None:
        pass

    def remove(self) -> None:
        pass


class BatchSimulation:
    """One run of a world."""

    def __init__(self, world: BatchWorld) -> None:
        self.world = world
        self.violations: list[str] = []
        self.outcomes: dict[str, str] = {}
        self._rng = random.Random(world.seed)
        self._computed: Counter[str] = Counter()
        """Number of computed texts by the name of their line or caller."""

    async def run(self) -> None:
        """Run the world until each job and each caller has ended."""
        with anyio.move_on_after(HANG_S) as hang:
            await self._run()
        if hang.cancelled_caught:
            self.violations.append(f"it hangs; ended have {sorted(self.outcomes)}")

    async def _run(self) -> None:
        world, memory = self.world, MemoryGovernor(10**12)
        memory.budget.answers = account = WatchedAccount(world.limit_letters * LETTER_BYTES, self.violations)
        config = EngineConfig(
            max_requests=world.engine_requests, max_batch_items=world.batch_items, target_delay_s=1000.0
        )
        running = run_engine(
            config,
            LetterModel(card=replace(EMBEDDER, token_width=2 * world.knows_width), on_forward=self._note),
            device=TickOffload(self._rng, world.device_ticks),
            preprocess=TickOffload(self._rng, 1),
            offload=TickOffload(self._rng, 0),
            options=StageOptions(clock=virtual.clock()),
            memory=memory,
        )
        async with running as engine:
            with mock.patch("anyio.to_thread.run_sync", self._in_a_thread):
                async with anyio.create_task_group() as tasks:
                    for number, job in enumerate(world.jobs):
                        tasks.start_soon(self._job, f"j{number}", job, engine)
                    for number, caller in enumerate(world.callers):
                        tasks.start_soon(self._caller, f"c{number}", caller, engine)
            if account.held_bytes or account.waiting or account._parties:
                self.violations.append(f"{account.held_bytes} bytes are left, and {account.waiting} wait")
            if engine.statistics().admission.requests:
                self.violations.append("the engine is empty, and counts requests")

    async def _in_a_thread(self, function: Callable[..., T], *arguments: Any, **_: Any) -> T:
        """Run a call that would block: files take their time, and no cancellation leaves it behind."""
        files = getattr(getattr(function, "__self__", None), "_writer", None)
        ticks = files.writing_ticks if isinstance(files, MemoryFiles) else 0
        with anyio.CancelScope(shield=True):
            await anyio.sleep(self._rng.randint(0, ticks) * TICK_S)
        return function(*arguments)

    def _note(self, texts: Sequence[str]) -> None:
        for text in texts:
            name = text.partition(" ")[0]
            self._computed[name] += 1

    # ---- jobs ----

    async def _job(self, name: str, plan: JobPlan, engine: Engine) -> None:
        await anyio.sleep(plan.arrives_at)
        registry = EngineRegistry()
        registry.open(engine)
        work = BatchWork(registry, BatchAnswers(name), auto_truncate=False, tenant=plan.tenant)
        lines = [self._line(name, number, line) for number, line in enumerate(plan.lines)]
        files = MemoryFiles(lines, plan.writing_ticks)
        stop, finished = anyio.Event(), False
        async with anyio.create_task_group() as tasks:
            if plan.stops_at < math.inf:
                tasks.start_soon(_set_at, stop, plan.stops_at)
            with anyio.CancelScope(deadline=plan.cancelled_at):
                window = Window(lines=plan.window)
                journal = cast(Journal, files)
                summary = await run_job(files, work, files, journal, window=window, report=lambda _: None, stop=stop)
                finished = summary.finished
            tasks.cancel_scope.cancel()
        now = anyio.current_time()
        self.outcomes[name] = "finished" if finished else "ended early"
        if not finished and now < min(plan.stops_at, plan.cancelled_at) - TICK_S / 2:
            self.violations.append(f"job {name} ended early, unasked")
        self._check_answers(name, plan, files, finished=finished)

    def _line(self, job: str, number: int, plan: LinePlan) -> BatchLine:
        body = {"input": self._texts(f"{job}/{number}", plan), "task": "token_embed"}
        return BatchLine(number, f"{number}", "/pooling", json.dumps(body).encode())

    @staticmethod
    def _texts(name: str, plan: LinePlan) -> list[str]:
        """Return different texts, which begin with the name of their request."""
        return [f"{name} {place} ".ljust(plan.letters, "a") for place in range(plan.texts)]

    def _letters(self, name: str, plan: LinePlan) -> int:
        return sum(map(len, self._texts(name, plan)))

    def _check_answers(self, name: str, plan: JobPlan, files: MemoryFiles, *, finished: bool) -> None:
        numbers = [answer.number for answer in files.written]
        if len(set(numbers)) < len(numbers):
            self.violations.append(f"job {name} has two answers of a line")
        if finished and len(numbers) < len(plan.lines):
            self.violations.append(
                f"job {name} has finished, and {len(plan.lines) - len(numbers)} lines have no answer"
            )
        for answer in files.written:
            line = plan.lines[answer.number]
            letters = self._letters(f"{name}/{answer.number}", line)
            most = self.world.limit_letters
            right = {200} if letters <= most else {413}
            if self.world.knows_width and letters * ESTIMATE_ERROR > most:
                right.add(413)  # by an estimate of its letters
            status = json.loads(b"".join(answer.pieces()))["response"]["status_code"]
            self.outcomes[f"{name}/{answer.number}"] = str(status)
            if status not in right:
                self.violations.append(
                    f"line {answer.number} of {name} has status {status}: {letters} letters of {most}"
                )
            if (computed := self._computed[f"{name}/{answer.number}"]) > TRIES * line.texts:
                self.violations.append(f"line {answer.number} of {name} was computed {computed / line.texts:g} times")

    # ---- others ----

    async def _caller(self, name: str, plan: CallerPlan, engine: Engine) -> None:
        await anyio.sleep(plan.arrives_at)
        account = engine.memory.budget.answers
        outcome = "left"
        with anyio.CancelScope(deadline=plan.leaves_at):
            for number in range(plan.again + 1):
                try:
                    outcome = await self._ask(f"{name}/{number}", plan, engine, account)
                except TooLarge:
                    outcome = "TooLarge"
                    letters = self._letters(f"{name}/{number}", plan.asks)
                    if letters * (ESTIMATE_ERROR if self.world.knows_width else 1) <= self.world.limit_letters:
                        self.violations.append(f"caller {name} was told that it can never fit")
                except StagedPoolError as error:
                    self.violations.append(f"caller {name}: {error!r}")
                if outcome == "gave up":
                    letters = self._letters(f"{name}/{number}", plan.asks) * (1 + (plan.kind == "route of a plugin"))
                    if letters <= SMALL * self.world.limit_letters and self.world.engine_requests >= MANY:
                        self.violations.append(f"caller {name} never found room for a little")
                    break
        self.outcomes[name] = outcome

    async def _ask(self, name: str, plan: CallerPlan, engine: Engine, account: ByteAccount) -> str:
        """Ask until there is an answer. After a rejection, a client that is not patient by itself asks again."""
        texts = self._texts(name, plan.asks)
        if plan.kind == "pipeline":
            await WaitingEngine(engine).embed(texts, outputs=["multi_vector"], tenant=plan.tenant)
            return "answered"
        request = EmbedRequest(inputs=tuple(map(TextInput, texts)), outputs=frozenset({Output.MULTI_VECTOR}))
        for rejections in range(MOST_REJECTIONS):
            try:
                with AnswerMemory(account, plan.tenant, is_written=True) as memory:
                    for _ in range(2 if plan.kind == "route of a plugin" else 1):
                        await engine.submit(
                            lambda: request,
                            lambda result: result,
                            priority=Priority.INTERACTIVE,
                            tenant=plan.tenant,
                            answer=memory.another(),
                        )
                    await anyio.sleep(plan.reads_ticks * TICK_S)
                    return "answered"
            except Overloaded:
                await anyio.sleep(self._rng.uniform(0.5, 1.5) * rejections * TICK_S)
        return "gave up"


async def _set_at(event: anyio.Event, at: float) -> None:
    await anyio.sleep_until(at)
    event.set()


def run_batches(world: BatchWorld, backend: Backend) -> BatchSimulation:
    """Run one world. Call it inside `prepared()`."""
    simulation = BatchSimulation(world)
    try:
        simulation.violations += virtual.run(simulation.run, backend=backend, seed=world.seed)
    except (Exception, Stuck) as error:  # noqa: BLE001  # a violation like any other
        simulation.violations.append(f"the program ended by {error!r}")
    return simulation


def run_batches_world(world: BatchWorld, backend: Backend) -> Report:
    """Run one world. Call it inside `prepared()`."""
    simulation = run_batches(world, backend)
    return Report(world.seed, backend, tuple(simulation.violations), (), Counter(simulation.outcomes.values()))


def run_batches_json(given: Any, backend: Backend) -> Report:
    """Run the world that a JSON value describes."""
    return run_batches_world(from_json(given), backend)


def run_batches_block(block: tuple[Sequence[int], Backend]) -> tuple[int, list[Report], Counter[str]]:
    """Run a block of seeds, as `tests.sim.running.run_block` does."""
    return run_block(block, lambda seed, backend: run_batches_world(draw(seed), backend))
