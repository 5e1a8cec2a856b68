"""A store of lines whose both ends are in this process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio
import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.remote.store import ArraysLost, joined
from staged_pool.stages.wire import Bytes, WireError


class Pause:
    """Holds a task until the test lets it go on; the test can wait until a task has arrived."""

    def __init__(self) -> None:
        self._arrived, self._open = anyio.Event(), anyio.Event()

    async def wait(self) -> None:
        """Wait for `open`."""
        self._arrived.set()
        await self._open.wait()

    async def arrived(self) -> None:
        """Wait until a task waits here."""
        with anyio.fail_after(30):
            await self._arrived.wait()

    def open(self) -> None:
        """Let all tasks go on, from now on."""
        self._open.set()


class LocalStore:
    """One end of a line. Its blocks are arrays of this process.

    Args:
        on_put: Awaited before a block is there.
        on_get: Awaited before a block of the peer is read.
    """

    def __init__(
        self,
        on_put: Callable[[], Awaitable[object]] | None = None,
        on_get: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self.blocks: dict[bytes, NDArray[np.uint8]] = {}
        self.peer: LocalStore
        self.put_blocks = 0
        self.is_closed = False
        self.has_room = True
        self.loses = False
        """True: blocks of the peer cannot be read."""
        self._on_put = on_put
        self._on_get = on_get

    async def put(self, parts: Sequence[Bytes]) -> bytes | None:
        """See `ArrayStore.put`."""
        if self._on_put is not None:
            await self._on_put()
        if not self.has_room:
            return None
        self.put_blocks += 1
        name = b"block %d" % self.put_blocks
        self.blocks[name] = joined(parts).copy()
        return name

    async def get(self, name: bytes) -> NDArray[np.uint8]:
        """See `ArrayStore.get`."""
        if self._on_get is not None:
            await self._on_get()
        if self.loses or (found := self.peer.blocks.get(name)) is None:
            raise ArraysLost(f"no {name.decode()}")
        found.flags.writeable = False
        return found

    def free(self, name: bytes) -> None:
        """See `ArrayStore.free`."""
        if self.blocks.pop(name, None) is None:
            raise WireError("the peer gives back a block that this end does not hold")

    def close(self) -> None:
        """See `ArrayStore.close`."""
        self.is_closed = True
        self.blocks.clear()


def two_ends(front: LocalStore | None = None, engine: LocalStore | None = None) -> tuple[LocalStore, LocalStore]:
    """Return the stores of a front and of the engine process, joined."""
    front, engine = front or LocalStore(), engine or LocalStore()
    front.peer, engine.peer = engine, front
    return front, engine
