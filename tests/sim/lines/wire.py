"""A byte stream in virtual time: it splits, joins and delays the bytes, and may be cut anywhere."""

from __future__ import annotations

import random

import anyio
import anyio.lowlevel

from tests.sim.lines.plan import TICK_S, LineWorld


class Way:
    """One direction of a stream."""

    def __init__(self, rng: random.Random, world: LineWorld) -> None:
        self._rng = rng
        self._world = world
        self._bytes = bytearray()
        self._is_cut = False
        self._changed = anyio.Event()

    async def send(self, item: bytes) -> None:
        """Take all bytes, piece by piece, as there is room."""
        await anyio.lowlevel.checkpoint()
        left = memoryview(item)
        while left:
            self._check()
            room = self._world.kernel_bytes - len(self._bytes)
            if not room:
                await self._changed.wait()
                continue
            size = self._rng.randint(1, min(len(left), room, self._world.pieces))
            if self._world.wire_ticks:
                await anyio.sleep(self._rng.randint(0, self._world.wire_ticks) * TICK_S)
                self._check()  # nothing comes behind what a cut has left
            self._bytes += left[:size]
            left = left[size:]
            self._change()

    def _check(self) -> None:
        if self._is_cut:
            raise anyio.BrokenResourceError

    async def receive(self, max_bytes: int) -> bytes:
        """Return some of the bytes that are there."""
        await anyio.lowlevel.checkpoint()
        while not self._bytes:
            if self._is_cut:
                raise anyio.EndOfStream if self._rng.random() < 0.5 else anyio.BrokenResourceError
            await self._changed.wait()
        size = self._rng.randint(1, min(len(self._bytes), max_bytes, self._world.pieces))
        data = bytes(self._bytes[:size])
        del self._bytes[:size]
        self._change()
        return data

    def cut(self) -> None:
        """End it; some of the bytes on their way are lost."""
        if not self._is_cut:
            del self._bytes[self._rng.randint(0, len(self._bytes)) :]
            self._is_cut = True
            self._change()

    def _change(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


class SimStream:
    """One end of a stream."""

    def __init__(self, out: Way, into: Way) -> None:
        self._out = out
        self._into = into

    async def send(self, item: bytes) -> None:
        await self._out.send(item)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await self._into.receive(max_bytes)

    def cut(self) -> None:
        """End both directions."""
        self._out.cut()
        self._into.cut()

    async def aclose(self) -> None:
        self.cut()
        await anyio.lowlevel.checkpoint()


def joined(rng: random.Random, world: LineWorld) -> tuple[SimStream, SimStream]:
    """Return both ends of a stream."""
    first, second = Way(rng, world), Way(rng, world)
    return SimStream(first, second), SimStream(second, first)
