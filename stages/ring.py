"""Shared memory between two processes: one writes blocks into it, and the other says when it has read them."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
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


class RingWriter:
    """The writing end of a ring.

    Blocks are given back in any order, and a block that is kept for long takes no room but its own. The first room that
    is large enough is used: pages that were written before are written faster than fresh ones.

    Args:
        descriptor: From `open_memory`. It is not closed; the mapping stays valid without it.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, 0)
        self._view = memoryview(self._memory)
        self._blocks: dict[int, int] = {}
        """Ends of the blocks that the peer has not given back, by their starts."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that the peer has not given back."""
        return sum(end - start for start, end in self._blocks.items())

    def write(self, parts: Sequence[Bytes]) -> int | None:
        """Write parts one behind the other into one block.

        Returns:
            The start of the block; None if the ring has no room for it.
        """
        if (start := self._room_for(sum(map(len, parts)))) is None:
            return None
        place = start
        for part in parts:
            self._view[place : place + len(part)] = part
            place += len(part)
        self._blocks[start] = max(place, start + 1)
        return start

    def give_back(self, start: int) -> None:
        """Take back a block that the peer has read.

        Raises:
            RingError: There is no such block.
        """
        if self._blocks.pop(start, None) is None:
            raise RingError(f"the peer gives back a block at {start}, where there is none")

    def close(self) -> None:
        """Unmap the memory."""
        self._view.release()
        self._memory.close()

    def _room_for(self, size: int) -> int | None:
        """Return the start of free room; None if there is too little in one piece."""
        place = 0
        for start in sorted(self._blocks):
            if place + size <= start:
                return place
            place = _aligned(self._blocks[start])
        return place if place + size <= len(self._view) else None


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
