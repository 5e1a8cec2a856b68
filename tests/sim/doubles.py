"""Doubles of threads, the device and the network; faithful to what cancellation does to them.

The world's seed and the contents of a call decide how long it takes. So leaving one out of a world does not change the
others.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import outcome

from staged_pool.runtime.card import Lane
from staged_pool.runtime.payloads import Payload
from staged_pool.runtime.requests import Image
from staged_pool.stages.errors import Abandoned, DeviceLost, MediaUnavailable, UnusableMedia
from staged_pool.stages.user_code import as_exception
from tests.sim.model import sent_name
from tests.sim.watch import Watch, payload_name
from tests.sim.world import TICK_S, World

A = TypeVar("A")
T = TypeVar("T")


@dataclass
class Machine:
    """Threads of preprocess and of the device, shared by the engines of a run."""

    world: World
    lost: bool = False
    """One of the device's threads is stuck in a call."""
    preprocess: dict[Lane, anyio.CapacityLimiter] = field(default_factory=dict)
    device: dict[Lane, anyio.Semaphore] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.world.config
        limits: dict[Lane, int] = {"text": config.preprocess_limit, "image": config.image_preprocess_threads}
        self.preprocess = {lane: anyio.CapacityLimiter(limit) for lane, limit in limits.items()}
        self.device = {lane: anyio.Semaphore(self.world.slots) for lane in limits}

    @property
    def borrowed(self) -> int:
        """Number of preprocess threads in a call."""
        return sum(limiter.borrowed_tokens for limiter in self.preprocess.values())


def ticks(world: World, most: int, what: object) -> float:
    """A number of ticks up to `most`, in seconds; the seed decides it for each call."""
    if not most:
        return 0.0
    return zlib.crc32(f"{world.seed} {what}".encode()) % (most + 1) * TICK_S


class SimOffload:
    """Threads under a limit, as `ThreadOffload`: cancellation waits for the call and then for the next checkpoint."""

    def __init__(self, watch: Watch, limiter: anyio.CapacityLimiter, most_ticks: int) -> None:
        self.watch = watch
        self.limiter = limiter
        self._most_ticks = most_ticks
        self._late = {call.count: call.seconds for call in watch.world.posted_late}
        self._calls = 0
        self._calls_open: set[anyio.CancelScope] = set()

    def abandon(self) -> None:
        """See `Abandonable`."""
        for scope in self._calls_open:
            scope.cancel()

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        self._calls += 1
        with self.watch.at_work():
            await anyio.lowlevel.checkpoint()
            async with self._thread() as scope:
                seconds = ticks(self.watch.world, self._most_ticks, self._calls)
                return await self._call(scope, function, argument, seconds)

    @asynccontextmanager
    async def _thread(self) -> AsyncIterator[anyio.CancelScope]:
        """A thread, once one is free: the scope that ends when the wait for it, or the call in it, is abandoned."""
        with anyio.CancelScope() as scope:
            self._calls_open.add(scope)
            try:
                async with self.limiter:
                    yield scope
            finally:
                self._calls_open.discard(scope)
        if scope.cancelled_caught:
            raise Abandoned("a call that does not end was abandoned with its thread")

    async def _call(
        self,
        scope: anyio.CancelScope,
        function: Callable[[A], T],
        argument: A,
        seconds: float,
        *,
        waits: bool = True,
        late_s: float = 0.0,
    ) -> T:
        """One call.

        Args:
            scope: Of the thread.
            function: See `Offload`.
            argument: See `Offload`.
            seconds: That it takes.
            waits: The thread gets a core only at the end of the time that the call takes, rather than at once.
            late_s: The event loop is told of its end so much later.
        """
        self.watch.active(seconds)
        done = None if waits else outcome.capture(function, argument)
        scope.shield = True  # only who abandons the call interrupts it
        await _sleep(aligned(self.watch, seconds))
        scope.shield = False
        if done is None:
            done = outcome.capture(function, argument)
        if late_s:
            await _sleep_shielded(late_s)
        await anyio.lowlevel.checkpoint_if_cancelled()
        return _value_of(done)


def _value_of(done: outcome.Maybe[T]) -> T:
    """Return the value of a call, or raise its error as threads do."""
    if isinstance(done, outcome.Error):
        raise as_exception(done.error)
    return done.unwrap()


def aligned(watch: Watch, seconds: float) -> float:
    """Round a call's length up, if calls end on a grid of ticks."""
    grid = watch.world.align_ticks * TICK_S
    if not grid:
        return seconds
    return math.ceil((watch.now() + seconds) / grid - 1e-9) * grid - watch.now()


async def _sleep(seconds: float) -> None:
    await (anyio.sleep(seconds) if seconds > 0 else anyio.lowlevel.checkpoint())


async def _sleep_shielded(seconds: float) -> None:
    """Sleep, shielded from cancellation."""
    with anyio.CancelScope(shield=True):
        await _sleep(seconds)


class SimPreprocess(SimOffload):
    """Preprocess threads of one lane; some calls take very long."""

    def __init__(self, watch: Watch, lane: Lane, limiter: anyio.CapacityLimiter) -> None:
        super().__init__(watch, limiter, watch.world.preprocess_ticks)
        self._lane = lane
        self._slow = {call.count: call.seconds for call in watch.world.slow_preprocess}

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        watch = self.watch
        call = watch.preprocess_calls
        watch.preprocess_calls += 1
        if isinstance(argument, str):  # from `tokenize`
            return await super().__call__(function, argument)
        given: Any = argument
        names = [sent_name(one) for one in given]
        watch.note("preprocess call {}: {}", call, names)
        watch.preprocess_starts(names, {one.lane for one in given} == {self._lane}, self._lane)
        with watch.at_work(), watch.preparing_images() if self._lane == "image" else nullcontext():
            await anyio.lowlevel.checkpoint()
            async with self._thread() as scope:
                seconds = self._slow.get(call)
                if seconds is None:
                    seconds = ticks(watch.world, self._most_ticks, names)
                watch.preprocessing += 1
                try:
                    late_s = self._late.get(call, 0.0)
                    return await self._call(scope, function, argument, seconds, waits=call % 3 == 0, late_s=late_s)
                finally:
                    watch.preprocessing -= 1
                    watch.note("preprocess call {} has ended", call)


class SimDevice:
    """The device's threads for one lane, as `DeviceThreads`: calls are never interrupted, and given up after the
    watchdog."""

    def __init__(self, watch: Watch, lane: Lane, machine: Machine) -> None:
        world = watch.world
        self._watch = watch
        self._lane = lane
        self._machine = machine
        self._slow = {call.count: call.seconds for call in world.slow_device}
        self._late = {call.count: call.seconds for call in world.posted_late}

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        threads = self._machine.device[self._lane]
        call = -1
        with self._watch.at_work():
            try:
                threads.acquire_nowait()
            except anyio.WouldBlock:
                await threads.acquire()
            try:
                call = self._watch.device_calls
                await self._run(argument)
                done = outcome.capture(function, argument)
            finally:
                threads.release()
            if late_s := self._late.get(call, 0.0):  # the thread has gone on by itself meanwhile
                await _sleep_shielded(late_s)
            return _value_of(done)

    def abandon(self) -> None:
        """Nothing to do: the call is given up by the watchdog, see `EngineConfig.watchdog_s`."""

    async def _run(self, payloads: Any) -> None:
        watch, world = self._watch, self._watch.world
        if self._machine.lost:
            watch.device_lost_at = min(watch.device_lost_at, watch.now())
            raise DeviceLost("one of the device's threads is stuck")
        call = watch.device_calls
        watch.device_calls += 1
        names = [payload_name(payload) for payload in payloads]
        watch.note("{} call {}: {}", self._lane, call, names)
        watch.device_starts(self._lane)
        seconds = self._slow.get(call)
        if seconds is None:
            seconds = aligned(watch, forward_s(world, payloads))
        timeout_s = world.config.watchdog_s
        watch.active(min(seconds, timeout_s))
        await _sleep_shielded(min(seconds, timeout_s))
        watch.note("{} call {} has ended", self._lane, call)
        stuck = seconds > timeout_s
        if not stuck:
            watch.device_ends(self._lane)
        if stuck or call == world.lost_at_call:
            self._machine.lost |= stuck
            watch.device_lost_at = min(watch.device_lost_at, watch.now())
            raise DeviceLost(f"the device did not answer within {timeout_s:g} s")


def forward_s(world: World, payloads: Sequence[Payload]) -> float:
    """Return the time of a forward, in seconds."""
    seconds = world.forward_s
    if world.device_ticks:
        seconds += ticks(world, world.device_ticks, [payload_name(payload) for payload in payloads])
    if world.token_s:
        token_counts = [world.contents[payload_name(payload)].tokens for payload in payloads]
        seconds += world.token_s * (max(token_counts) * len(token_counts) if world.pads else sum(token_counts))
    return seconds


class SimFetch:
    """Double of the image fetcher: fast, slow or hanging. A cancellation ends a fetch, as it ends a real one."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    async def __call__(self, image: Image, /) -> Image:
        watch = self._watch
        assert isinstance(image.source, str)
        client, index, place = map(int, image.source.split(":"))
        plan = watch.world.by_number[client].items[index].urls[place]
        watch.fetch_starts(client)
        watch.fetching[client] += 1
        try:
            with watch.at_work():
                watch.active(plan.takes_s)
                await anyio.sleep(plan.takes_s)
        finally:
            watch.fetching[client] -= 1
            watch.fetch_ends(client)
        match plan.fault:
            case "unusable":
                raise UnusableMedia("There is nothing at this URL.")
            case "unavailable":
                raise MediaUnavailable("The host failed.")
            case "raises":
                raise ValueError("a bug of the fetcher")
        return Image(image.source.encode())
