"""One world on its way through virtual time: the real engine with its real stages, its host and its clients."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from staged_pool.runtime.engine import Engine, run_engine
from staged_pool.runtime.inside import Asker, Room
from staged_pool.runtime.model import Lane, Payload, Row
from staged_pool.runtime.requests import EmbedRequest
from staged_pool.runtime.results import EmbedResult
from staged_pool.stages.batch import BatchStage
from staged_pool.stages.errors import InvalidInput, StagedPoolError
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.ticket import Timeline
from staged_pool.stages.work import Batch, Item
from tests.sim.doubles import SimDevice, SimFetch, SimModel, SimOffload, SimPreprocess, source_of
from tests.sim.invariants import HANG_S, IDLE_S, LEFT, Outcome, Watch
from tests.sim.world import TICK_S, ClientPlan, World


class WorkerCrash(Exception):
    """A bug that the simulator plants in a worker."""


class HostError(Exception):
    """What a host raises inside the engine's block."""


class Simulation:
    """One world on its way through virtual time."""

    def __init__(self, world: World, *, verbose: bool) -> None:
        self.world = world
        self.watch = Watch(world, verbose)
        rng = random.Random(world.seed)
        limits: dict[Lane, int] = {
            "text": world.config.preprocess_limit,
            "image": world.config.image_preprocess_threads,
        }
        self.device = {lane: SimDevice(self.watch, lane, rng) for lane in limits}
        self.preprocess = {
            lane: SimPreprocess(self.watch, lane, limit, world.preprocess_ticks, rng) for lane, limit in limits.items()
        }
        self.offload = SimOffload(self.watch, 2, world.codec_ticks, rng)
        self._rng = rng
        self._seams: Counter[str] = Counter()
        self._leave: dict[int, Callable[[], object]] = {}
        self._started = anyio.Event()
        self._leave_block = anyio.Event()
        self._host_scope = anyio.CancelScope()
        self._host_task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """The whole world. Ends when every client has its outcome and the engine's block has been left."""
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
        offloads = (*self.preprocess.values(), self.offload)
        self.watch.check_world_ended(sum(offload.limiter.borrowed_tokens for offload in offloads))

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
        """Whoever opens the engine."""
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
                    cores=world.cores,
                    options=StageOptions(restarts=world.restarts, clock=watch.now, seam=self._seam),
                ) as engine:
                    self._observe(engine)
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

    def _observe(self, engine: Engine) -> None:
        """Look over the engine's shoulder: at the door of admission, and where batches are cut."""
        watch = self.watch
        watch.engine = engine
        admission = engine._admission
        enter, count_items, leave = admission.enter, admission.count_items, admission.leave

        def watched_enter(*, body_bytes: int, timeout_s: float, asker: Asker) -> Room:
            try:
                room = enter(body_bytes=body_bytes, timeout_s=timeout_s, asker=asker)
            except StagedPoolError as error:
                watch.refused(error, others=len(watch.rooms))
                raise
            watch.rooms[id(room)] = room
            return room

        def watched_count_items(room: Room, inputs: Mapping[Lane, int]) -> None:
            try:
                count_items(room, inputs)
            except StagedPoolError as error:
                watch.refused(error, others=len(watch.rooms) - 1)
                raise

        def watched_leave(room: Room, *, answered: bool = False, elsewhere_s: float = 0.0) -> None:
            leave(room, answered=answered, elsewhere_s=elsewhere_s)
            del watch.rooms[id(room)]

        for target, name, watched in (
            (admission, "enter", watched_enter),
            (admission, "count_items", watched_count_items),
            (admission, "leave", watched_leave),
        ):
            setattr(target, name, watched)
        for lane, stage in engine._pipeline.batch.items():
            self._observe_batches(lane, stage)

    def _observe_batches(self, lane: Lane, stage: BatchStage[Payload, Row]) -> None:
        builder = stage._builder
        take = builder.take

        def watched_take(
            still_wanted: Callable[[Item[Payload]], bool], *, among: int, running: int
        ) -> Batch[Payload] | None:
            waiting_cost = builder.cost
            batch = take(still_wanted, among=among, running=running)
            if batch is not None:
                self.watch.batch_formed(lane, batch, waiting_cost, in_hand=stage.meter.busy)
            if not builder and (remembered := builder.turns.tenants):
                self.watch.fail(f"nothing waits, and {remembered} tenants are remembered")
            return batch

        setattr(builder, "take", watched_take)  # noqa: B010  # a method, which mypy would not let go

    async def _until_quiet(self) -> None:
        """Until every client has its outcome, or nothing has happened for so long that none will get any more."""
        watch = self.watch
        while not watch.all_done.is_set():
            left_s = watch.busy_until + IDLE_S - watch.now()
            if left_s <= 0:
                break
            with anyio.move_on_after(left_s):
                await watch.all_done.wait()
        await anyio.sleep(TICK_S / 10)  # what happens at this very moment is over then
        watch.check_quiet()

    async def _seam(self, point: str) -> None:
        count = self._seams[point]
        self._seams[point] = count + 1
        world, watch = self.world, self.watch
        if (delay_s := world.delays.get((point, count))) is not None:
            watch.active(delay_s)
            watch.note("{} is held up", point)
            await anyio.sleep(delay_s)
        elif world.yields:
            await anyio.lowlevel.checkpoint()
        if (point, count) in world.crashes:
            watch.note("{} crashes", point)
            watch.active()
            watch.crashed_at.setdefault(point.split(".", maxsplit=1)[0], []).append(watch.now())
            raise WorkerCrash(point)

    async def _direct(self, tasks: TaskGroup) -> None:
        """Let clients come and go, and disturb the host, at the moments that the world says."""
        world = self.world
        events: list[tuple[float, int, Callable[[], object]]] = []

        def at(moment: float, act: Callable[[], object]) -> None:
            if moment < math.inf:
                events.append((moment, self._rng.randint(0, 1000), act))

        for client in world.clients:
            at(client.arrives_at, self._arrival(tasks, client))
            at(client.leaves_at, self._departure(client))
        for moment, timeout_s in world.drains:
            at(moment, self._start_drain(tasks, timeout_s))
        if world.end != "quiet":
            at(world.ends_at, self._end_block)
        events.sort(key=lambda event: event[:2])
        if world.end == "quiet" and events:
            self.watch.busy_until = max(self.watch.busy_until, events[-1][0])
        for moment, _, act in events:
            if moment > self.watch.now():
                await anyio.sleep_until(moment)
            act()

    def _arrival(self, tasks: TaskGroup, client: ClientPlan) -> Callable[[], object]:
        return lambda: tasks.start_soon(self._client, client)

    def _departure(self, client: ClientPlan) -> Callable[[], object]:
        def leave() -> None:
            if (act := self._leave.get(client.number)) is not None:
                self.watch.note("client {} leaves", client.number)
                act()
            elif client.number not in self.watch.outcomes:
                self._leave[client.number] = lambda: None  # it leaves before it has come

        return leave

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
        watch.outcome(client, outcome)

    async def _ask_natively(self, client: ClientPlan) -> Outcome:
        """As a program that knows nothing of anyio's scopes."""
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
                    return tokens.strings[0]
                timeline = self.watch.timelines[client.number] = Timeline()
                return await engine.submit(
                    lambda: self._decode(client),
                    lambda result: self._encode(client, result),
                    body_bytes=client.body_bytes,
                    timeout_s=client.timeout_s,
                    timeline=timeline,
                    priority=client.priority,
                    tenant=client.tenant,
                )
        except (StagedPoolError, TimeoutError) as error:
            return error

    def _decode(self, client: ClientPlan) -> EmbedRequest:
        if client.decode == "raises":
            raise ValueError("a bug of the dialect")
        if client.decode == "refuses":
            raise InvalidInput("The body is wrong.")
        return EmbedRequest(
            inputs=tuple(source_of((client.number, index), item) for index, item in enumerate(client.items)),
            cache_salt=client.salt,
        )

    def _encode(self, client: ClientPlan, result: EmbedResult) -> EmbedResult:
        if client.encode == "raises":
            raise ValueError("a bug of the dialect")
        if client.encode == "refuses":
            raise InvalidInput("It cannot be written.")
        return result


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
