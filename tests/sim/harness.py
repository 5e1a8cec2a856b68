"""One world on its way through virtual time: the real engine with its real stages, its host and its clients."""

from __future__ import annotations

import asyncio
import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from staged_pool.runtime.card import Lane
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.tasks.score import rank
from staged_pool.stages.errors import InvalidInput, StagedPoolError
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.work import Request
from tests.sim import internals, liveness, outcomes, throughput
from tests.sim.doubles import Machine, SimDevice, SimFetch, SimOffload, SimPreprocess
from tests.sim.model import SimModel, request_of
from tests.sim.seams import Seams
from tests.sim.streams import Gathered
from tests.sim.watch import IDLE_S, LEFT, Outcome, Watch, WatchedTimeline
from tests.sim.world import SHARED_CORES, TICK_S, ClientPlan, CodecFault, World
from tests.support.user_code import RustPanic

HANG_S = 300.0
"""A world that lasts longer has hung."""


class HostError(Exception):
    """An error that a host raises inside the engine's block."""


class Simulation:
    """One engine of a world, with its clients."""

    def __init__(self, world: World, machine: Machine, *, verbose: bool) -> None:
        self.world = world
        self.watch = Watch(world, verbose)
        lanes: tuple[Lane, ...] = ("text", "image")
        self.device = {lane: SimDevice(self.watch, lane, machine) for lane in lanes}
        self.preprocess = {lane: SimPreprocess(self.watch, lane, machine.preprocess[lane]) for lane in lanes}
        self.offload = SimOffload(self.watch, anyio.CapacityLimiter(2), world.codec_ticks)
        self.seams = Seams(world, self.watch, self._leave_now)
        self._leave: dict[int, Callable[[], object]] = {}
        self._started = anyio.Event()
        self._leave_block = anyio.Event()
        self._host_scope = anyio.CancelScope()
        self._host_task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Run the world until each client has its outcome and the engine has ended."""
        with anyio.move_on_after(HANG_S) as hang:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._host_natively if self._is_native() else self._host)
                await self._started.wait()
                await self._direct(tasks)
        if hang.cancelled_caught:
            waiting = [c.number for c in self.world.clients if c.number not in self.watch.outcomes]
            where = "the engine's block is left" if self.watch.ended else "the engine's block is not left"
            self.watch.fail(f"it hangs: clients {waiting} wait, {where}")
            return
        self.watch.check_world_ended()
        if self.offload.limiter.borrowed_tokens:
            self.watch.fail("limiter tokens are gone")
        if self.world.liveness:
            liveness.check(self.watch)
        throughput.check(self.watch)

    def _is_native(self) -> bool:
        return self.world.end == "native cancel" and _on_asyncio()

    async def _host_natively(self) -> None:
        """The engine's block in a task that asyncio itself cancels."""
        self._host_task = asyncio.get_running_loop().create_task(self._host())
        await asyncio.wait([self._host_task])
        if self._host_task.cancelled():
            self.watch.note("the host's task was cancelled")
        elif error := self._host_task.exception():
            raise error

    async def _host(self) -> None:
        """The task that opens the engine."""
        world, watch = self.world, self.watch
        try:
            with self._host_scope:
                async with run_engine(
                    world.config,
                    SimModel(watch),
                    device=self.device["text"],
                    image_device=self.device["image"],
                    preprocess=self.preprocess["text"],
                    image_preprocess=self.preprocess["image"],
                    offload=self.offload,
                    fetch=SimFetch(watch),
                    shared_cores=SHARED_CORES if world.shares_cores else None,
                    options=self._options(),
                ) as engine:
                    watch.engine = engine
                    internals.observe(engine, watch)
                    self._started.set()
                    if world.end == "quiet":
                        await self._until_quiet()
                    else:
                        await self._leave_block.wait()
                    watch.note("the engine's block ends: {}", world.end)
                    watch.stopping_at = min(watch.stopping_at, watch.now())
                    watch.drains_until = min(watch.drains_until, watch.now() + world.config.drain_timeout_s)
                    if world.end == "raise":
                        watch.cancelled_at = watch.now()
                        raise HostError
        except HostError:
            pass
        finally:
            watch.note("the engine has ended")
            watch.check_engine_ended()

    def _options(self) -> StageOptions:
        channel: Any = self.seams.channel
        return StageOptions(restarts=self.world.restarts, clock=self.seams.clock(), channel=channel)

    async def _until_quiet(self) -> None:
        """Wait until every client has its outcome, or nothing has happened for too long."""
        watch = self.watch
        while not watch.all_done.is_set():
            left_s = IDLE_S if watch.at_hand else watch.busy_until + IDLE_S - watch.now()
            if left_s <= 0:
                break
            with anyio.move_on_after(left_s):
                await watch.all_done.wait()
        await anyio.sleep(TICK_S / 10)  # events of this very moment are over then
        watch.check_quiet()

    async def _direct(self, tasks: TaskGroup) -> None:
        """Let clients come and go, and disturb the host, at the moments of the world."""
        world = self.world
        events: list[tuple[float, int, Callable[[], object]]] = []

        def at(moment: float, what: str, act: Callable[[], object]) -> None:
            if moment < math.inf:
                events.append((moment, zlib.crc32(f"{world.seed} {what}".encode()), act))

        for client in world.clients:
            at(client.arrives_at, f"comes {client.number}", self._arrival(tasks, client))
            at(client.leaves_at, f"leaves {client.number}", self._departure(client.number))
        for drain in world.drains:
            at(drain.at, f"drains {drain.at}", self._start_drain(tasks, drain.timeout_s))
        if world.end != "quiet":
            at(world.ends_at, "ends", self._end_block)
        events.sort(key=lambda event: event[:2])
        if world.end == "quiet" and events:
            self.watch.busy_until = max(self.watch.busy_until, events[-1][0])
        if not world.clients:
            self.watch.all_done.set()
        for moment, _, act in events:
            if moment > self.watch.now():
                await anyio.sleep_until(moment)
            act()

    def _arrival(self, tasks: TaskGroup, client: ClientPlan) -> Callable[[], object]:
        return lambda: tasks.start_soon(self._client, client)

    def _departure(self, number: int) -> Callable[[], object]:
        def leave() -> None:
            if (act := self._leave.get(number)) is not None:
                self.watch.note("client {} leaves", number)
                act()
            elif number not in self.watch.outcomes:
                self._leave[number] = lambda: None  # it leaves before it has come

        return leave

    def _leave_now(self, number: int) -> None:
        """Make a client leave while one of its items is handed over."""
        if number not in self.watch.outcomes:
            self.watch.left_at.setdefault(number, self.watch.now())
            self._departure(number)()

    def _start_drain(self, tasks: TaskGroup, timeout_s: float) -> Callable[[], object]:
        async def drain() -> None:
            engine = self.watch.engine
            assert engine is not None
            began_at = self.watch.now()
            await engine.drain(timeout_s)
            self.watch.drained(began_at, timeout_s)

        def start() -> None:
            self.watch.note("drain for {:g} s", timeout_s)
            self.watch.stopping_at = min(self.watch.stopping_at, self.watch.now())
            self.watch.drains_until = min(self.watch.drains_until, self.watch.now() + timeout_s)
            tasks.start_soon(drain)

        return start

    def _end_block(self) -> None:
        watch = self.watch
        watch.stopping_at = min(watch.stopping_at, watch.now())
        if self.world.end in ("cancel", "native cancel"):
            watch.cancelled_at = watch.now()
            watch.note("the host is cancelled")
            if self._host_task is not None:
                self._host_task.cancel()
            else:
                self._host_scope.cancel()
        else:
            self._leave_block.set()

    # ---- one client ----

    async def _client(self, client: ClientPlan) -> None:
        watch = self.watch
        watch.active()
        watch.note("client {} comes: {} items, {} bytes", client.number, len(client.items), client.body_bytes)
        if client.native and _on_asyncio():
            outcome = await self._ask_natively(client)
        else:
            with anyio.CancelScope() as scope:
                if client.number in self._leave:
                    scope.cancel()
                self._leave[client.number] = scope.cancel
                outcome = await self._ask(client)
            if scope.cancelled_caught:
                outcome = LEFT
        self._leave[client.number] = lambda: None
        outcomes.settle(watch, client, outcome)

    async def _ask_natively(self, client: ClientPlan) -> Outcome:
        """Ask in a task that `Task.cancel` ends, like a program without anyio's scopes."""
        task = asyncio.get_running_loop().create_task(self._ask(client))
        if client.number in self._leave:
            task.cancel()
        self._leave[client.number] = task.cancel
        await asyncio.wait([task])
        return LEFT if task.cancelled() else task.result()

    async def _ask(self, client: ClientPlan) -> Outcome:
        engine = self.watch.engine
        assert engine is not None
        try:
            with _fail_after(client.host_timeout_s):
                if client.tokenizes:
                    tokens = await engine.tokenize(f"tokens {client.number}")
                    return "".join(tokens.strings)
                if client.streams:
                    return await self._stream(client)
                return await engine.submit(
                    lambda: self._decode(client),
                    lambda result: self._encode(client, result),
                    waits=client.waits,
                    **self._how(client),
                )
        except (StagedPoolError, TimeoutError) as error:
            return error
        except ValueError as error:  # of the caller's own functions that write and take results: a stream passes it on
            if client.streams and "raises" in (client.encode, client.gives):
                return error
            raise

    def _how(self, client: ClientPlan) -> dict[str, Any]:
        return {
            "body_bytes": client.body_bytes,
            "timeout_s": client.timeout_s,
            "timeline": WatchedTimeline(watch=self.watch, client=client.number),
            "priority": client.priority,
            "tenant": client.tenant,
        }

    async def _stream(self, client: ClientPlan) -> Outcome:
        """Stream the results to a slow reader."""
        engine = self.watch.engine
        assert engine is not None
        gathered = Gathered(self.watch, client)

        def write(places: Sequence[int], result: Any) -> tuple[Sequence[int], Any]:
            return places, self._encode(client, result)

        tokens = await engine.stream(lambda: self._decode(client), write, gathered.give, **self._how(client))
        whole: Outcome = gathered.whole(tokens)
        return whole

    def _decode(self, client: ClientPlan) -> Request:
        _end(client.decode, "The body is wrong.")
        return request_of(self.world, client)

    def _encode(self, client: ClientPlan, result: Any) -> Any:
        _end(client.encode, "It cannot be written.")
        return rank(result, None) if client.task == "rerank" and not client.streams else result


def _end(fault: CodecFault | None, told: str) -> None:
    """End a function of the caller with a fault."""
    match fault:
        case "raises":
            raise ValueError("a bug of the dialect")
        case "rejects":
            raise InvalidInput(told)
        case "panics":
            raise RustPanic("a bug of a parser")
        case "strays":
            raise asyncio.CancelledError


def _on_asyncio() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def _fail_after(seconds: float) -> Iterator[None]:
    if seconds == math.inf:
        yield
    else:
        with anyio.fail_after(seconds):
            yield
