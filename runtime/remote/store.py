"""Store: memory that both ends of a line can read, wherever they run, such as the object store of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from staged_pool.stages.wire import Bytes


class ArraysLost(Exception):
    """The arrays of a message cannot be read: their machine has gone, or its store has dropped them."""


class ArrayStore(Protocol):
    """Store of one line. Its arrays belong to the end that has put them there, and end with the line."""

    async def put(self, parts: Sequence[Bytes]) -> bytes | None:
        """Write parts one behind the other into a new block, off the event loop.

        Returns:
            The name of the block, for the peer; None if the store has no room.
        """
        ...

    async def get(self, name: bytes) -> NDArray[np.uint8]:
        """Return the bytes of a block of the peer.

        They are not copied if they are on this machine. The array stays valid when the peer frees the block.

        Raises:
            ArraysLost: They cannot be read any more.
            WireError: This is no name of a block.
        """
        ...

    def free(self, name: bytes) -> None:
        """Drop a block that the peer has got.

        Raises:
            WireError: There is no such block.
        """
        ...

    def close(self) -> None:
        """Drop all blocks that this end has put: the line has ended."""
        ...


def joined(parts: Sequence[Bytes]) -> NDArray[Any]:
    """Return parts one behind the other as one array; a single part is not copied."""
    arrays = [np.frombuffer(part, np.uint8) for part in parts]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
