"""Messages between a pool and one of its processes: pickles over a socket, large arrays in shared memory."""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from staged_pool.stages.ring import open_memory

MEMORY_BYTES: Final = 64 << 20
"""Shared memory in each direction. Pages that were never written take no memory."""

_IN_SOCKET_BYTES: Final = 1 << 18
"""Most bytes of arrays that go through the socket: below this size it is as quick as shared memory."""

_HEADER: Final = struct.Struct("<QQ?")
"""Bytes of the pickle, number of arrays, and True if these are in shared memory."""


class Pipe:
    """One end of a pipe. One thread at a time may use it, and each message is received before the next one is sent.

    Values are pickled: each end trusts the other, which runs the same program as the same user. Arrays stay out of the
    pickle. They are copied into shared memory by the sender, and out of it by the receiver.

    Args:
        end: Socket to the other end.
        written: Shared memory that this end writes, from `open_memory`. It is closed here.
        read: Shared memory that the other end writes. It is closed here.
    """

    def __init__(self, end: socket.socket, written: int, read: int) -> None:
        self._socket = end
        self._file = end.makefile("rb")
        self._written = np.frombuffer(mmap.mmap(written, 0), np.uint8)
        self._read = np.frombuffer(mmap.mmap(read, 0, prot=mmap.PROT_READ), np.uint8)
        os.close(written)
        os.close(read)

    def send(self, value: object) -> None:
        """Send a value.

        Raises:
            OSError: The other end is gone.
        """
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        arrays = [buffer.raw() for buffer in buffers]
        sizes = array("Q", map(len, arrays))
        in_memory = _IN_SOCKET_BYTES < sum(sizes) <= len(self._written)
        if in_memory:
            place = 0
            for each in arrays:
                self._written[place : place + len(each)] = np.frombuffer(each, np.uint8)
                place += len(each)
        header = _HEADER.pack(len(head), len(arrays), in_memory)
        self._socket.sendall(b"".join((header, sizes.tobytes(), head)))
        for each in () if in_memory else arrays:
            self._socket.sendall(each)

    def receive(self) -> Any:
        """Wait for a value.

        Raises:
            EOFError: The other end is gone.
            OSError: It has ended with messages unread.
        """
        head_bytes, count, in_memory = _HEADER.unpack(self._exactly(_HEADER.size))
        sizes = array("Q", self._exactly(8 * count))
        head = self._exactly(head_bytes)
        if in_memory:
            return pickle.loads(head, buffers=self._copied(sizes))
        return pickle.loads(head, buffers=[self._exactly(size) for size in sizes])

    def close(self) -> None:
        """Close the socket: the other end receives EOF. The memory is unmapped with the last reference to it."""
        self._file.close()
        self._socket.close()

    def _copied(self, sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Copy arrays out of the shared memory, which the next message overwrites."""
        ends = np.cumsum(sizes)
        return [self._read[end - size : end].copy() for end, size in zip(ends, sizes, strict=True)]

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        if self._file.readinto(data) < size:
            raise EOFError
        return data


def open_pipe() -> tuple[socket.socket, socket.socket, int, int]:
    """Open both ends of a pipe: two sockets, and the descriptors of the memory that the first and the second writes."""
    ours, theirs = socket.socketpair()
    return ours, theirs, open_memory(MEMORY_BYTES), open_memory(MEMORY_BYTES)
