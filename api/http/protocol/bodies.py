"""Request bodies while they arrive: a large one is never copied on the event loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final

import anyio.to_thread

from staged_pool.api.limits.server_state import ServerState

GATHERED_BYTES: Final = 2**18
"""Size up to which arriving pieces of a body are joined to one."""

INLINE_JOIN_BYTES: Final = 2**20
"""Maximum bytes of a body joined on the event loop, in tenths of a millisecond."""


class Body:
    """A body that arrives in pieces. They are kept apart, since one growing buffer would be copied repeatedly."""

    def __init__(self) -> None:
        self.size = 0
        self.pieces: list[bytes | bytearray] = []
        """Received pieces, in order."""

    def add(self, chunk: bytes | bytearray) -> None:
        self.size += len(chunk)
        if not self.pieces or len(self.pieces[-1]) + len(chunk) > GATHERED_BYTES:
            self.pieces.append(chunk)
            return
        last = self.pieces[-1]
        if not isinstance(last, bytearray):
            last = self.pieces[-1] = bytearray(last)
        last += chunk

    def give_up(self) -> Iterator[bytes]:
        """Yield the pieces in order, and release each."""
        self.pieces.reverse()
        while self.pieces:
            yield bytes(self.pieces.pop())

    async def whole(self, server_state: ServerState) -> bytes | bytearray:
        """Return the body as one piece.

        A large body is joined in a thread, one at a time, because it is in memory twice meanwhile.
        """
        if len(self.pieces) == 1:
            return self.pieces[0]
        if self.size <= INLINE_JOIN_BYTES:
            return b"".join(self.pieces)
        return await anyio.to_thread.run_sync(_joined, self.pieces, self.size, limiter=server_state.joining)


def _joined(pieces: Sequence[bytes | bytearray], size: int) -> bytearray:
    """Join pieces as `bytes.join` does, but release the interpreter's lock between them."""
    body = bytearray(size)
    start = 0
    with memoryview(body) as room:
        for piece in pieces:
            room[start : start + len(piece)] = piece
            start += len(piece)
            time.sleep(0)  # another thread gets the lock
    return body
