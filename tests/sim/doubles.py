"""What takes the place of the threads, the device and the model; faithful in what cancellation does to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import numpy as np

from staged_pool.runtime.model import Lane, ModelCard, ModelInput, Row, Tokens, TokenSequence
from staged_pool.runtime.requests import Chat, Output
from staged_pool.stages.errors import DeviceLost, InvalidInput, ModelFailed, OutOfMemory
from staged_pool.stages.work import Prepared
from tests.doubles import CARD
from tests.sim.invariants import Watch, vector
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

    async def _call(self, function: Callable[[A], T], argument: A, seconds: float) -> T:
        self.watch.active(seconds)
        with anyio.CancelScope(shield=True):
            await anyio.sleep(seconds)
        self.watch.active()
        return function(argument)


class SimPreprocess(SimOffload):
    """The threads of preprocess; some calls take very long."""

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        watch = self.watch
        call = watch.preprocess_calls
        watch.preprocess_calls += 1
        if isinstance(argument, str):  # from `tokenize`
            return await super().__call__(function, argument)
        names = _names(argument)
        watch.note(f"preprocess call {call}: {names}")
        watch.preprocess_starts(names)
        await anyio.lowlevel.checkpoint()
        async with self.limiter:
            seconds = watch.world.slow_preprocess.get(call)
            if seconds is None:
                seconds = self._rng.randint(0, self._ticks) * TICK_S
            watch.preprocessing += 1
            try:
                return await self._call(function, argument, seconds)
            finally:
                watch.preprocessing -= 1
                watch.note(f"preprocess call {call} has ended")


class SimDevice:
    """The device's threads, as `DeviceThreads`: calls are never interrupted, and given up after the watchdog."""

    def __init__(self, watch: Watch, rng: random.Random) -> None:
        self._watch = watch
        self._rng = rng
        self._lost = False

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        watch, world = self._watch, self._watch.world
        if self._lost:
            raise DeviceLost("one of the device's threads is stuck")
        call = watch.device_calls
        watch.device_calls += 1
        watch.note(f"device call {call}: {argument}")
        watch.device_starts()
        seconds = world.slow_device.get(call)
        if seconds is None:
            seconds = self._rng.randint(0, world.device_ticks) * TICK_S
        patience_s = world.config.watchdog_s
        watch.active(min(seconds, patience_s))
        watch.on_device += 1
        with anyio.CancelScope(shield=True):
            await anyio.sleep(min(seconds, patience_s))
        watch.note(f"device call {call} has ended")
        watch.active()
        stuck = seconds > patience_s
        if stuck or call == world.lost_at_call:
            if stuck:
                self._lost = True
            watch.device_lost_at = min(watch.device_lost_at, watch.now())
            watch.on_device -= not stuck
            raise DeviceLost(f"the device did not answer within {patience_s:g} s")
        watch.on_device -= 1
        return function(argument)


class SimModel:
    """Its token ids are the name of an item, and so is its row."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._world = watch.world

    @property
    def card(self) -> ModelCard:
        return replace(CARD, forward_workers=self._world.slots)

    def pads(self, lane: Lane) -> bool:
        return self._world.pads

    def _item(self, name: Sequence[int]) -> ItemPlan:
        return self._world.clients[name[0]].items[name[1]]

    def preprocess(self, inputs: Sequence[ModelInput]) -> list[Prepared[TokenSequence] | InvalidInput]:
        names = _names(inputs)
        if any(self._item(name).fault == "preprocess raises" for name in names):
            raise ValueError("poison")
        return [
            InvalidInput("The input is invalid.")
            if (item := self._item(name)).fault == "invalid"
            else Prepared(TokenSequence(list(name), given.outputs), item.cost, item.key)
            for name, given in zip(names, inputs, strict=True)
        ]

    def forward(self, payloads: Sequence[TokenSequence], at_once: int = 1, /) -> list[Row | ModelFailed]:
        items = [self._item(payload.ids) for payload in payloads]
        faults = {item.fault for item in items}
        most = self._world.out_of_memory_above
        if most is not None and len(payloads) > most:
            self._watch.most_items = min(self._watch.most_items, max(1, len(payloads) // 2))
            raise OutOfMemory("no room")
        if "out of memory" in faults:
            self._watch.most_items = min(self._watch.most_items, max(1, len(payloads) // 2))
            raise OutOfMemory("no room")
        if "forward raises" in faults:
            raise ValueError("poison")
        return [
            ModelFailed("NaN")
            if item.fault == "nan"
            else Row(
                {Output.DENSE: np.array(vector((payload.ids[0], payload.ids[1]), item.cost), dtype=np.float32)}, payload
            )
            for payload, item in zip(payloads, items, strict=True)
        ]

    def tokenize(self, source: str | Chat, *, add_special_tokens: bool) -> Tokens:
        text = str(source)
        return Tokens([ord(c) for c in text], [text], [(0, len(text))])

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def _names(inputs: Any) -> list[tuple[int, int]]:
    return [given.source.source for given in inputs]
