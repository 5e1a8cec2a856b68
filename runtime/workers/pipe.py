"""Messages between a pool and one of its processes: pickles over a socket, large arrays in shared memory."""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
from array import array
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from staged_pool.stages.ring import open_memory

MEMORY_BYTES: Final = 64 << 20
"""Shared memory in each direction. Pages that were never written take no memory."""

_IN_SOCKET_BYTES: Final = 1 << 18
"""Most bytes of arrays that go through the socket: below this size it is as quick as shared memory."""

_HEADER: Final = struct.Struct("<QQ?")
"""Bytes of the pickle, number of arrays, and True if these are in shared memory."""

_RECEIPT_BYTES: Final = 8
"""Begin of each shared memory: the number of messages that its writer has received."""

Buffer: TypeAlias = memoryview | bytearray


@dataclass(frozen=True, slots=True)
class Message:
    """A pickled value; made by `pack`."""

    head: bytes | bytearray
    arrays: Sequence[Buffer]
    """Arrays of the value, outside of the pickle."""

    def value(self) -> Any:
        """Return the value.

        Raises:
            Exception: Any: its classes may be code of users.
        """
        return pickle.loads(self.head, buffers=self.arrays)


def pack(value: object) -> Message:
    """Pickle a value. The arrays in it are not copied.

    Raises:
        Exception: Any: it cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return Message(head, [buffer.raw() for buffer in buffers])


class Pipe:
    """One end of a pipe. One thread at a time may use it, and each message is received before the next one is sent.

    Each end trusts the other, which runs the same program as the same user. Arrays stay out of the pickle. They are
    copied into shared memory by the sender, and out of it by the receiver.

    A receiver notes in shared memory that it has a message, before it looks into it. The note outlives its process. So
    a sender whose peer dies knows whether the message is to blame.

    Args:
        end: Descriptor of the socket to the other end. It is this pipe's from now on, as the others are.
        written: Descriptor of the shared memory that this end writes.
        read: Descriptor of the shared memory that the other end writes.
    """

    def __init__(self, end: int, written: int, read: int) -> None:
        self._socket = socket.socket(fileno=end)
        self._file = self._socket.makefile("rb")
        ours = np.frombuffer(mmap.mmap(written, 0), np.uint8)
        its = np.frombuffer(mmap.mmap(read, 0, prot=mmap.PROT_READ), np.uint8)
        self._receipts, self._written = ours[:_RECEIPT_BYTES].view(np.uint64), ours[_RECEIPT_BYTES:]
        self._its_receipts, self._read = its[:_RECEIPT_BYTES].view(np.uint64), its[_RECEIPT_BYTES:]
        self._sent = 0
        os.close(written)
        os.close(read)

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            OSError: The other end is gone.
        """
        self._sent += 1
        sizes = array("Q", map(len, message.arrays))
        in_memory = _IN_SOCKET_BYTES < sum(sizes) <= len(self._written)
        if in_memory:
            place = 0
            for each in message.arrays:
                self._written[place : place + len(each)] = np.frombuffer(each, np.uint8)
                place += len(each)
        header = _HEADER.pack(len(message.head), len(sizes), in_memory)
        self._socket.sendall(b"".join((header, sizes.tobytes(), message.head)))
        for each in () if in_memory else message.arrays:
            self._socket.sendall(each)

    def receive(self) -> Message:
        """Wait for a message.

        Raises:
            EOFError: The other end is gone.
            OSError: It has ended with messages unread.
        """
        head_bytes, count, in_memory = _HEADER.unpack(self._exactly(_HEADER.size))
        sizes = array("Q", self._exactly(8 * count))
        head = self._exactly(head_bytes)
        arrays = self._copied(sizes) if in_memory else list(map(self._exactly, sizes))
        self._receipts += 1
        return Message(head, arrays)

    @property
    def is_received(self) -> bool:
        """True if the other end, which has ended, has received the last message."""
        return bool(self._its_receipts[0] == self._sent)

    def shut_down(self) -> None:
        """End the connection: a receiver at either end gets EOF, even if other processes have it open."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket: the other end receives EOF. The memory is unmapped with the last reference to it."""
        self.shut_down()
        self._file.close()
        self._socket.close()

    def close_copy(self) -> None:
        """Close the socket in a process that inherited it: the connection must not outlive its end."""
        os.close(self._socket.detach())

    def _copied(self, sizes: Sequence[int]) -> Sequence[Buffer]:
        """Copy arrays out of the shared memory, which the next message overwrites."""
        ends = np.cumsum(sizes)
        return [self._read[end - size : end].copy().data for end, size in zip(ends, sizes, strict=True)]

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        if self._file.readinto(data) < size:
            raise EOFError
        return data


class End(NamedTuple):
    """Descriptors of one end of a pipe, in the order of the arguments of `Pipe`."""

    socket: int
    written: int
    read: int


def open_pipe() -> tuple[End, End]:
    """Open both ends of a pipe. Each belongs to the `Pipe` or the process that gets it.

    Raises:
        OSError: The operating system has no more descriptors or memory.
    """
    with ExitStack() as opened:

        def kept(descriptor: int) -> int:
            opened.callback(os.close, descriptor)
            return descriptor

        ours, theirs = (kept(end.detach()) for end in socket.socketpair())
        down, up = kept(open_memory(MEMORY_BYTES)), kept(open_memory(MEMORY_BYTES))
        ends = End(ours, down, up), End(theirs, kept(os.dup(up)), kept(os.dup(down)))
        opened.pop_all()
    return ends
