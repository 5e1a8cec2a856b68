"""What takes the place of the threads, the device and the model; faithful in what cancellation does to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import numpy as np
import outcome

from staged_pool.runtime.model import (
    Lane,
    ModelCard,
    ModelInput,
    Payload,
    Picture,
    Pixels,
    Row,
    Tokens,
    TokenSequence,
)  # fmt: skip
from staged_pool.runtime.requests import Chat, Image, Output, TextInput
from staged_pool.runtime.statistics import ImageCacheStatistics, ReplicaStatistics
from staged_pool.stages.errors import (
    DeviceLost,
    InvalidInput,
    MediaUnavailable,
    ModelFailed,
    OutOfMemory,
    UnusableMedia,
)  # fmt: skip
from staged_pool.stages.work import Prepared
from tests.doubles import CARD
from tests.sim.invariants import Name, Watch, payload_name, vector
from tests.sim.world import TICK_S, ItemPlan

A = TypeVar("A")
T = TypeVar("T")


class SimOffload:
    """Threads under a limit, as `ThreadOffload`: cancellation waits for the call and then for the next checkpoint."""

    def __init__(self, watch: Watch, limit: int, ticks: int, rng: random.Random) -> None:
        self.watch = watch
        self.limiter = anyio.CapacityLimiter(limit)
        self._ticks = ticks
        self._rng = rng

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        await anyio.lowlevel.checkpoint()
        async with self.limiter:
            return await self._call(function, argument, self._rng.randint(0, self._ticks) * TICK_S)

    async def _call(self, function: Callable[[A], T], argument: A, seconds: float, *, waits: bool = True) -> T:
        """`waits`: the thread gets a core only at the end of the time that the call takes, rather than at once."""
        self.watch.active(seconds)
        done = None if waits else outcome.capture(function, argument)
        await _sleep_shielded(seconds)
        self.watch.active()
        return function(argument) if done is None else done.unwrap()


async def _sleep_shielded(seconds: float) -> None:
    if seconds:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(seconds)
    else:
        await anyio.lowlevel.cancel_shielded_checkpoint()


class SimPreprocess(SimOffload):
    """The threads of preprocess of one lane; some calls take very long."""

    def __init__(self, watch: Watch, lane: Lane, limit: int, ticks: int, rng: random.Random) -> None:
        super().__init__(watch, limit, ticks, rng)
        self._lane = lane

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        watch = self.watch
        call = watch.preprocess_calls
        watch.preprocess_calls += 1
        if isinstance(argument, str):  # from `tokenize`
            return await super().__call__(function, argument)
        given: Any = argument
        names = [name_of(one) for one in given]
        watch.note("preprocess call {}: {}", call, names)
        watch.preprocess_starts(names, {one.lane for one in given} == {self._lane}, self._lane)
        await anyio.lowlevel.checkpoint()
        async with self.limiter:
            seconds = watch.world.slow_preprocess.get(call)
            if seconds is None:
                seconds = self._rng.randint(0, self._ticks) * TICK_S
            watch.preprocessing += 1
            try:
                return await self._call(function, argument, seconds, waits=call % 3 == 0)
            finally:
                watch.preprocessing -= 1
                watch.note("preprocess call {} has ended", call)


class SimDevice:
    """The device's threads for one lane, as `DeviceThreads`: calls are never interrupted, and given up after the
    watchdog."""

    def __init__(self, watch: Watch, lane: Lane, rng: random.Random) -> None:
        self._watch = watch
        self._lane = lane
        self._rng = rng
        self._lost = False
        self._threads = anyio.Semaphore(watch.world.slots)

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        try:
            self._threads.acquire_nowait()
        except anyio.WouldBlock:
            await self._threads.acquire()
        try:
            return await self._run(function, argument)
        finally:
            self._threads.release()

    async def _run(self, function: Callable[[A], T], argument: A) -> T:
        watch, world = self._watch, self._watch.world
        if self._lost:
            raise DeviceLost("one of the device's threads is stuck")
        call = watch.device_calls
        watch.device_calls += 1
        watch.note("device call {}: {}", call, argument)
        watch.device_starts(self._lane)
        seconds = world.slow_device.get(call)
        if seconds is None:
            seconds = self._rng.randint(0, world.device_ticks) * TICK_S
        patience_s = world.config.watchdog_s
        watch.active(min(seconds, patience_s))
        watch.on_device[self._lane] += 1
        await _sleep_shielded(min(seconds, patience_s))
        watch.note("device call {} has ended", call)
        watch.active()
        stuck = seconds > patience_s
        if stuck or call == world.lost_at_call:
            if stuck:
                self._lost = True
            watch.device_lost_at = min(watch.device_lost_at, watch.now())
            watch.on_device[self._lane] -= not stuck
            raise DeviceLost(f"the device did not answer within {patience_s:g} s")
        watch.on_device[self._lane] -= 1
        return function(argument)


class SimFetch:
    """Gets pictures from nowhere: quickly, slowly, or not at all. A cancellation ends it, as it ends a real one."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    async def __call__(self, image: Image, /) -> Image:
        watch = self._watch
        assert isinstance(image.source, str)
        client, index, place = map(int, image.source.split(":"))
        plan = watch.world.clients[client].items[index].fetches[place]
        watch.fetch_starts((client, index))
        watch.fetching[client] += 1
        try:
            await anyio.sleep(plan.takes_s)
        finally:
            watch.fetching[client] -= 1
        watch.active()
        match plan.fault:
            case "unusable":
                raise UnusableMedia("There is nothing at this URL.")
            case "unavailable":
                raise MediaUnavailable("The host failed.")
            case "raises":
                raise ValueError("a bug of the fetcher")
        return Image(image.source.encode())


class SimModel:
    """Its token ids are the name of an item, and so is its row."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._world = watch.world
        self._card = replace(CARD, forward_workers=self._world.slots, lanes=self._world.lanes)

    @property
    def card(self) -> ModelCard:
        return self._card

    def pads(self, lane: Lane) -> bool:
        return self._world.pads

    def _item(self, name: Name) -> ItemPlan:
        return self._world.clients[name[0]].items[name[1]]

    def preprocess(self, inputs: Sequence[ModelInput]) -> list[Prepared[Payload] | InvalidInput]:
        names = [name_of(given) for given in inputs]
        for name, given in zip(names, inputs, strict=True):
            self._check_pictures(name, given)
        if any(self._item(name).fault == "preprocess raises" for name in names):
            raise ValueError("poison")
        return [
            InvalidInput("The input is invalid.")
            if (item := self._item(name)).fault == "invalid"
            else Prepared(_payload(item.like or name, given), item.cost, (item.key, isinstance(given.source, Image)))
            for name, given in zip(names, inputs, strict=True)
        ]

    def _check_pictures(self, name: Name, given: ModelInput) -> None:
        wanted = [":".join(map(str, (*name, place))).encode() for place in range(self._item(name).pictures)]
        if (shown := [image.source for image in given.images]) != wanted:
            self._watch.fail(f"preprocess was given the pictures {shown} instead of {wanted}")

    def forward(self, payloads: Sequence[Payload], at_once: int = 1, /) -> list[Row | ModelFailed]:
        names = [payload_name(payload) for payload in payloads]
        items = [self._item(name) for name in names]
        faults = {item.fault for item in items}
        most = self._world.out_of_memory_above
        if "out of memory" in faults or (most is not None and len(payloads) > most):
            lane = items[0].lane
            self._watch.most_items[lane] = min(self._watch.most_items[lane], max(1, len(payloads) // 2))
            raise OutOfMemory("no room")
        if "forward raises" in faults:
            raise ValueError("poison")
        return [
            ModelFailed("NaN")
            if item.fault == "nan"
            else Row({Output.DENSE: np.array(vector(name, item.cost), dtype=np.float32)}, payload)
            for payload, name, item in zip(payloads, names, items, strict=True)
        ]

    def tokenize(self, source: str | Chat, *, add_special_tokens: bool) -> Tokens:
        text = str(source)
        return Tokens([ord(c) for c in text], [text], [(0, len(text))])

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))

    @property
    def devices(self) -> Sequence[ReplicaStatistics]:
        return []

    @property
    def image_cache(self) -> ImageCacheStatistics | None:
        return None

    def clear_image_cache(self) -> None:
        """It keeps nothing."""

    def close(self) -> None:
        """It has no processes."""


def source_of(name: Name, item: ItemPlan) -> TextInput | Image:
    """What a client sends for an item: its name, in whatever form."""
    if not item.pictures:
        return TextInput(name)
    images = []
    for place in range(item.pictures):
        text = ":".join(map(str, (*name, place)))
        images.append(Image(text if place in item.fetches else text.encode()))
    return images[0] if len(images) == 1 else TextInput(Chat(({"role": "user", "content": tuple(images)},)))


def name_of(given: ModelInput) -> Name:
    """The name that is in what a client has sent."""
    if not given.images:
        ids: Any = given.source
        return ids.source[0], ids.source[1]
    source = given.images[0].source
    client, index, _ = (source if isinstance(source, str) else source.decode()).split(":")
    return int(client), int(index)


def _payload(name: Name, given: ModelInput) -> Payload:
    if isinstance(given.source, Image):
        return Picture(Pixels(np.array(name, dtype=np.float32)), given.outputs, 1)
    images = tuple(Pixels(np.zeros(1, dtype=np.uint8)) for _ in given.images)
    return TokenSequence(list(name), given.outputs, images=images)
