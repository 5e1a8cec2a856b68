"""Bodies of requests, while they arrive: never copied whole on the event loop."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Final

import anyio.to_thread

from staged_pool.api.memory import KEPT_BYTES, come_in_large_pages
from staged_pool.api.traffic import Traffic

GATHERED_BYTES: Final = 2**18
"""Small pieces of a body are joined as they come, until they are so large."""

JOINED_AT_ONCE_BYTES: Final = 2**20
"""A body of so many bytes, and no larger one, is joined on the event loop: that takes tenths of a millisecond."""

LARGE_BYTES: Final = KEPT_BYTES
"""Bodies from here on lie in memory that is new each time."""


class Body:
    """A body that comes in pieces. One that grew in place would be copied over and over."""

    def __init__(self) -> None:
        self.size = 0
        self._pieces: list[bytes | bytearray] = []

    def add(self, chunk: bytes | bytearray) -> None:
        self.size += len(chunk)
        if not self._pieces or len(self._pieces[-1]) + len(chunk) > GATHERED_BYTES:
            self._pieces.append(chunk)
            return
        last = self._pieces[-1]
        if not isinstance(last, bytearray):
            last = self._pieces[-1] = bytearray(last)
        last += chunk

    async def whole(self, traffic: Traffic) -> bytes | bytearray:
        """All of it, in one piece. A large one is joined in a thread, one at a time: it is there twice meanwhile."""
        if len(self._pieces) == 1:
            return self._pieces[0]
        if self.size <= JOINED_AT_ONCE_BYTES:
            return b"".join(self._pieces)
        return await anyio.to_thread.run_sync(_joined, self._pieces, self.size, limiter=traffic.joining)


def unwritten(size: int) -> bytearray:
    """Room for so many bytes, with anything in it: it takes no memory until something is written."""
    room = _new_bytearray(None, size)
    if size >= LARGE_BYTES:
        come_in_large_pages(room)
    return room


_new_bytearray: Callable[[None, int], bytearray] = ctypes.pythonapi.PyByteArray_FromStringAndSize
ctypes.pythonapi.PyByteArray_FromStringAndSize.restype = ctypes.py_object
ctypes.pythonapi.PyByteArray_FromStringAndSize.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)


def _joined(pieces: Sequence[bytes | bytearray], size: int) -> bytearray:
    """What `join` makes, without keeping the interpreter's lock: memory that is new comes page by page, in tens of
    milliseconds for tens of megabytes, and the event loop would have to wait for all of it."""
    body = unwritten(size)
    start = 0
    with memoryview(body) as room:
        for piece in pieces:
            room[start : start + len(piece)] = piece
            start += len(piece)
            time.sleep(0)  # whoever waits for the lock gets it
    return body
