"""Shared memory between two processes: one writes blocks into it, and the other says when it has read them."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from staged_pool.stages.wire import Bytes, WireError

ALIGNMENT: Final = 64
"""Blocks begin at multiples of this many bytes, a cache line."""

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Neither process can change the size. Otherwise the peer of one that shrinks it would die of SIGBUS."""


def open_memory(size: int) -> int:
    """Make shared memory without a name, and return its descriptor.

    It exists for as long as a process has it open or mapped, so nothing is left behind by a process that is killed.

    Args:
        size: In bytes. Pages that were never written take no memory.
    """
    descriptor = os.memfd_create("staged-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


class RingError(WireError):
    """The peer refers to memory that is not a block of the ring."""


@dataclass(slots=True)
class _Block:
    start: int
    end: int
    is_free: bool = False


class RingWriter:
    """The writing end of a ring.

    Blocks are taken in order around the ring, and given back in any order. Room is free again once all blocks before it
    are.

    Args:
        descriptor: From `open_memory`. It is not closed; the mapping stays valid without it.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, 0)
        self._view = memoryview(self._memory)
        self._blocks: deque[_Block] = deque()
        self._by_start: dict[int, _Block] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that the peer has not given back."""
        return sum(block.end - block.start for block in self._by_start.values())

    def write(self, parts: Sequence[Bytes]) -> int | None:
        """Write parts one behind the other into one block.

        Returns:
            The start of the block; None if the ring has no room for it.
        """
        size = sum(map(len, parts))
        if (start := self._room_for(size)) is None:
            return None
        place = start
        for part in parts:
            self._view[place : place + len(part)] = part
            place += len(part)
        block = _Block(start, max(place, start + 1))
        self._blocks.append(block)
        self._by_start[start] = block
        return start

    def give_back(self, start: int) -> None:
        """Take back a block that the peer has read.

        Raises:
            RingError: There is no such block.
        """
        if (block := self._by_start.pop(start, None)) is None:
            raise RingError(f"the peer gives back a block at {start}, where there is none")
        block.is_free = True
        while self._blocks and self._blocks[0].is_free:
            self._blocks.popleft()

    def close(self) -> None:
        """Unmap the memory."""
        self._view.release()
        self._memory.close()

    def _room_for(self, size: int) -> int | None:
        """Return the start of free room; None if there is too little in one piece."""
        whole = len(self._view)
        if not self._blocks:
            return 0 if size <= whole else None
        first, last = self._blocks[0].start, _aligned(self._blocks[-1].end)
        if self._blocks[-1].start < first:  # the blocks go around the end of the memory
            return last if last + size <= first else None
        if last + size <= whole:
            return last
        return 0 if size <= first else None


class RingReader:
    """The reading end of a ring.

    Args:
        descriptor: See `RingWriter`.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)

    def read(self, start: int, size: int) -> memoryview:
        """Return a view of a block. It is valid until the block is given back.

        Raises:
            RingError: The block is not within the ring.
        """
        if start < 0 or size < 0 or start + size > len(self._memory):
            raise RingError(f"the peer refers to {size} bytes at {start}; the ring has {len(self._memory)}")
        return memoryview(self._memory)[start : start + size]


def _aligned(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT
