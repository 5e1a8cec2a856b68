"""Port: one end of the line between a front and the engine process."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from staged_pool.runtime.remote.arrays import Block
from staged_pool.runtime.remote.messages import Free, Message, Welcome, decoded, encoded
from staged_pool.stages.link import Link, Stream
from staged_pool.stages.ring import RingReader, RingWriter
from staged_pool.stages.wire import Bytes, Frame, WireError

RING_BYTES: Final = 64 << 20
"""Size of each ring. Pages that were never written take no memory."""

IN_FRAME_BYTES: Final = 1 << 18
"""Most bytes of arrays that go through the socket.

Measured: below this size a copy into the socket takes less time than a block of shared memory and its return.
"""


Handler: TypeAlias = Callable[[Any, Callable[[], Block]], object]
"""Takes a message, and a function that returns its arrays."""


class Rings(NamedTuple):
    """Descriptors of the two rings of a line, as one of its ends sees them."""

    written: int
    """This end writes, and the peer reads."""
    read: int


class Port:
    """Sends and receives messages. Large arrays go through shared memory, small ones behind their message.

    Args:
        stream: Byte stream to the peer.
        rings: Rings of the line, whose descriptors are closed here. None: all arrays go through the stream.
        handlers: The handler of each class of messages that the peer may send first.
    """

    def __init__(self, stream: Stream, rings: Rings | None, handlers: Mapping[type[Any], Handler]) -> None:
        self._link = Link(stream, self._take)
        self._handlers = handlers
        self._writer = None if rings is None else RingWriter(rings.written)
        self._reader = None if rings is None else RingReader(rings.read)
        for descriptor in rings or ():
            os.close(descriptor)  # the mappings need it no more
        self._read: deque[int] = deque()
        """Blocks that nobody reads any more. Any thread may append."""
        self.close = self._link.close

    @property
    def is_open(self) -> bool:
        """False once the line has ended: messages that are posted then are dropped."""
        return self._link.is_open

    async def run(self) -> str:
        """Send and receive until either end closes or fails. Returns the reason; see `Link.run`."""
        try:
            return await self._link.run()
        finally:
            if self._writer is not None:
                self._writer.close()
            self._reader = None  # unmapped with the last array that is a view of it

    def take(self, handlers: Mapping[type[Any], Handler]) -> None:
        """Take these messages from now on, and no others: the ends have greeted each other."""
        self._handlers = {**handlers, Free: self._take_back}

    def post(self, message: Message | Welcome) -> None:
        """Send a message without arrays."""
        self.give_back()
        kind, head = encoded(message)
        self._link.post(kind, head)

    def post_arrays(self, message: Callable[[int | None, int], Message], parts: Sequence[Bytes]) -> None:
        """Send a message with arrays.

        Args:
            message: Makes the message from the start of the block, None for arrays in the frame, and its size in bytes.
            parts: The arrays, as `arrays.add` appends them.
        """
        if not self.is_open:
            return
        self.give_back()
        size, start = sum(map(len, parts)), None
        if self._writer is not None and size > IN_FRAME_BYTES:
            start = self._writer.write(parts)
        kind, head = encoded(message(start, size))
        self._link.post(kind, head, *(parts if start is None else ()))

    def give_back(self) -> None:
        """Tell the peer which blocks are read. Called with each message, and from time to time by the owner."""
        if self._read:
            starts = [self._read.popleft() for _ in range(len(self._read))]
            kind, head = encoded(Free(starts))
            self._link.post(kind, head)

    def _take(self, frame: Frame) -> None:
        message = decoded(frame.kind, frame.head)
        if (handler := self._handlers.get(type(message))) is None:
            raise WireError(f"the peer sends a {type(message).__name__} message, which this end does not take")
        handler(message, lambda: self._block(message, frame.raw))

    def _block(self, message: Any, raw: bytes) -> Block:
        """Return the arrays of a message."""
        if message.block is None:
            return Block(raw)
        if self._reader is None:
            raise WireError("the peer refers to shared memory, and this line has none")
        data = np.frombuffer(self._reader.read(message.block, message.block_bytes), np.uint8)
        # Views of it keep it alive: once it is gone, nothing reads the block.
        weakref.finalize(data, self._read.append, message.block).atexit = False
        return Block(data)

    def _take_back(self, message: Free, _: object) -> None:
        if self._writer is None:
            raise WireError("the peer gives back shared memory, and this line has none")
        for start in message.starts:
            self._writer.give_back(start)
