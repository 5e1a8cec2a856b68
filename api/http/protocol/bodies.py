"""Bodies of requests, while they arrive: never copied whole on the event loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final

import anyio.to_thread

from staged_pool.api.limits.server_state import ServerState

GATHERED_BYTES: Final = 2**18
"""Small pieces of a body are joined as they come, until they are so large."""

JOINED_AT_ONCE_BYTES: Final = 2**20
"""A body of so many bytes, and no larger one, is joined on the event loop: that takes tenths of a millisecond."""


class Body:
    """A body that comes in pieces. One that grew in place would be copied over and over."""

    def __init__(self) -> None:
        self.size = 0
        self.pieces: list[bytes | bytearray] = []
        """What has come, in its order."""

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
        """Give the pieces in their order, and let go of each."""
        self.pieces.reverse()
        while self.pieces:
            yield bytes(self.pieces.pop())

    async def whole(self, server_state: ServerState) -> bytes | bytearray:
        """All of it, in one piece. A large one is joined in a thread, one at a time: it is there twice meanwhile."""
        if len(self.pieces) == 1:
            return self.pieces[0]
        if self.size <= JOINED_AT_ONCE_BYTES:
            return b"".join(self.pieces)
        return await anyio.to_thread.run_sync(_joined, self.pieces, self.size, limiter=server_state.joining)


def _joined(pieces: Sequence[bytes | bytearray], size: int) -> bytearray:
    """Join as `join` does, without keeping the interpreter's lock for tens of megabytes at once."""
    body = bytearray(size)
    start = 0
    with memoryview(body) as room:
        for piece in pieces:
            room[start : start + len(piece)] = piece
            start += len(piece)
            time.sleep(0)  # whoever waits for the lock gets it
    return body
