"""Port: one end of the line between a front and the engine process."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, cast

import anyio
import numpy as np
from anyio.abc import TaskGroup

from staged_pool.runtime.remote.arrays import Block
from staged_pool.runtime.remote.limits import require
from staged_pool.runtime.remote.messages import (
    HEADS,
    BlockName,
    Free,
    Kind,
    Message,
    Welcome,
    decoded,
    encoded,
    limits_of,
)
from staged_pool.runtime.remote.store import ArraysLost, ArrayStore
from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.link import Link, Stream
from staged_pool.stages.ring import RingReader, RingWriter
from staged_pool.stages.wire import Bytes, Frame, FrameLimits, WireError

RING_BYTES: Final = 64 << 20
"""Size of each ring. Pages that were never written take no memory."""

IN_FRAME_BYTES: Final = 1 << 18
"""Most bytes of arrays that go through the socket of a line with other memory.

Measured: below this size a copy into the socket takes less time than a block of shared memory and its return.
"""

MOST_GETS: Final = 1024
"""Most blocks that are on their way from the store. The credits of the lanes allow far fewer."""

Handler: TypeAlias = Callable[[Any, Callable[[], Block]], object]
"""Takes a message, and a function that returns its arrays. The function raises `ArraysLost` if they are lost."""


class Rings(NamedTuple):
    """The two rings of a line, as one of its ends sees them."""

    written: RingWriter
    """This end writes, and the peer reads."""
    read: RingReader

    @classmethod
    def mapped(cls, written: int, read: int) -> Rings:
        """Map the rings of two descriptors, which are closed in any case: the mappings need them no more.

        Raises:
            OSError: The system has no descriptors or no memory for it.
        """
        with ExitStack() as files:
            for descriptor in (written, read):
                files.callback(os.close, descriptor)
            with ExitStack() as unless_both:
                writer = RingWriter(written)
                unless_both.callback(writer.close)
                reader = RingReader(read)
                unless_both.pop_all()
            return cls(writer, reader)


class Port:
    """Sends and receives messages. Large arrays go through shared memory, small ones behind their message.

    A message whose arrays are in a store is handled when they are here, which may be behind later messages.

    Args:
        stream: Byte stream to the peer.
        rings: Rings of the line, which are unmapped with the end of the port. None: it has none.
        handlers: The handler of each class of messages that the peer may send first.
        store: Store of the line. Without it and without rings, all arrays go through the stream.
    """

    def __init__(
        self,
        stream: Stream,
        rings: Rings | None,
        handlers: Mapping[type[Any], Handler],
        store: ArrayStore | None = None,
    ) -> None:
        self._link = Link(stream, self._take, self._limits_of)
        self._handlers = handlers
        self._writer = None if rings is None else rings.written
        self._reader = None if rings is None else rings.read
        self._read: deque[BlockName] = deque()
        """Blocks that nobody reads any more. Any thread may append."""
        self._store = store
        self._getting: TaskGroup
        """Tasks that get arrays from the store."""
        self._gets = 0
        """Number of these tasks."""
        self._wrong: str | None = None
        """Reason for the end that such a task has found."""
        self.close = self._link.close

    @property
    def is_open(self) -> bool:
        """False once the line has ended: messages that are posted then are dropped."""
        return self._link.is_open

    async def run(self) -> str:
        """Send and receive until either end closes or fails. Returns the reason; see `Link.run`."""
        reason = ""
        try:
            with single_errors():
                async with anyio.create_task_group() as self._getting:
                    reason = await self._link.run()
                    self._getting.cancel_scope.cancel()
            return self._wrong or reason
        finally:
            if self._store is not None:
                self._store.close()
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

    @property
    def has_store(self) -> bool:
        """True if large arrays may be put into a store before their message."""
        return self._store is not None

    async def put(self, parts: Sequence[Bytes]) -> bytes | None:
        """Put arrays into the store of the line.

        Returns:
            The name of their block; None if they have to go with their message.
        """
        if self._store is None or not self.is_open or sum(map(len, parts)) <= IN_FRAME_BYTES:
            return None
        return await self._store.put(parts)

    def post_arrays(
        self, message: Callable[[BlockName | None, int], Message], parts: Sequence[Bytes], stored: bytes | None = None
    ) -> None:
        """Send a message with arrays.

        Args:
            message: Makes the message from the block, None for arrays in the frame, and its size in bytes.
            parts: The arrays, as `arrays.add` appends them.
            stored: The block from `put` that has them.
        """
        if not self.is_open:
            return
        self.give_back()
        size, block = sum(map(len, parts)), cast("BlockName | None", stored)
        if block is None and self._writer is not None and size > IN_FRAME_BYTES:
            block = self._writer.write(parts)
        kind, head = encoded(message(block, size))
        self._link.post(kind, head, *(parts if block is None else ()))

    def give_back(self) -> None:
        """Tell the peer which blocks are read. Called with each message, and from time to time by the owner."""
        if self._read:
            blocks = [self._read.popleft() for _ in range(len(self._read))]
            kind, head = encoded(Free(blocks))
            self._link.post(kind, head)

    def _limits_of(self, kind: int) -> FrameLimits:
        limits = limits_of(kind)
        self._handler_of(HEADS[Kind(kind)])
        return limits

    def _handler_of(self, message: type[Any]) -> Handler:
        if (handler := self._handlers.get(message)) is None:
            raise WireError(f"the peer sends a {message.__name__} message, which this end does not take")
        return handler

    def _take(self, frame: Frame) -> None:
        message = decoded(frame.kind, frame.head)
        handler = self._handler_of(type(message))
        if isinstance(block := getattr(message, "block", None), bytes):
            if self._store is None:
                raise WireError("the peer refers to a store, and this line has none")
            require(self._gets < MOST_GETS, "block", "is one more than may be on their way")
            self._gets += 1
            self._getting.start_soon(self._get, self._store, handler, message, block)
        else:
            handler(message, lambda: self._block(message, frame.raw))

    async def _get(self, store: ArrayStore, handler: Handler, message: Any, name: bytes) -> None:
        """Get the arrays of a message from the store, and handle it."""
        try:
            try:
                data = await store.get(name)
            except ArraysLost as error:
                handler(message, partial(_raise, str(error)))
            else:
                if len(data) != (size := message.block_bytes):
                    raise WireError(f"the peer announces a block of {size} bytes, and has stored {len(data)}")
                handler(message, lambda: Block(data))
        except WireError as error:
            self._wrong = str(error)
            self._getting.cancel_scope.cancel()
        self._gets -= 1
        self._read.append(name)
        self.give_back()

    def _block(self, message: Any, raw: bytes) -> Block:
        """Return the arrays of a message."""
        if message.block is None:
            require(len(raw) == message.block_bytes, "block_bytes", "is not the size of the arrays in the frame")
            return Block(raw)
        if self._reader is None:
            raise WireError("the peer refers to shared memory, and this line has none")
        data = np.frombuffer(self._reader.read(message.block, message.block_bytes), np.uint8)
        # Views of it keep it alive: once it is gone, nothing reads the block.
        weakref.finalize(data, self._read.append, message.block).atexit = False
        return Block(data)

    def _take_back(self, message: Free, _: object) -> None:
        for block in message.blocks:
            owner = self._store if isinstance(block, bytes) else self._writer
            if owner is None:
                raise WireError("the peer gives back shared memory, and this line has none")
            if isinstance(block, bytes):
                cast(ArrayStore, owner).free(block)
            else:
                cast(RingWriter, owner).give_back(block)


def _raise(message: str) -> Block:
    raise ArraysLost(message)
