"""Frames between the processes of one server: a versioned header, a head, and raw bytes behind it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

VERSION: Final = 1
"""Version of the frames. Both ends of a link must have the same one."""

MOST_BYTES: Final = 1 << 30
"""Longest frame. A longer one is a sign that the peer has lost its place in the stream."""

_HEADER: Final = struct.Struct("!BBIQ")
"""Version, kind, and the lengths of the head and of the raw bytes."""


Bytes: TypeAlias = bytes | bytearray | memoryview


class WireError(Exception):
    """The peer sends what this end cannot read. The link must end."""


class Frame(NamedTuple):
    """One message of the peer."""

    kind: int
    head: bytes
    """The encoded message."""
    raw: bytes
    """Arrays that the head describes, one behind the other."""


def frame(kind: int, head: bytes, *raw: Bytes) -> list[Bytes]:
    """Return the parts of a frame, to be sent one behind the other.

    Args:
        kind: Kind of the message, 0 to 255.
        head: See `Frame.head`.
        raw: Parts of `Frame.raw`, of single bytes. They are not copied.
    """
    return [_HEADER.pack(VERSION, kind, len(head), sum(map(len, raw))) + head, *raw]


class FrameLimits(NamedTuple):
    """Most bytes of a frame of one kind."""

    head: int
    raw: int


LimitsOf: TypeAlias = Callable[[int], FrameLimits]
"""Returns the limits of a kind of frame. It raises `WireError` for a kind that this end does not take."""


class FrameReader:
    """Cuts a byte stream into frames. It holds the beginning of a frame until the rest has come.

    Args:
        limits_of: Asked once the header of a frame has come: a frame beyond its limits is not held.
    """

    def __init__(self, limits_of: LimitsOf) -> None:
        self._limits_of = limits_of
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that these bytes complete. Take all of them before the next call.

        Args:
            data: The next bytes of the stream.

        Raises:
            WireError: The peer has another version, sends no frames, or announces one beyond its limits.
        """
        source: bytes | bytearray = data
        if self._held:
            self._held += data
            source = self._held
        start = 0
        while (found := _frame_at(source, start, self._limits_of)) is not None:
            whole, start = found
            yield whole
        if source is self._held:
            del self._held[:start]  # a large frame comes in hundreds of pieces: it is not copied for each
        else:
            self._held += memoryview(data)[start:]

    @property
    def held_bytes(self) -> int:
        """Bytes of a frame whose rest has not come. At the end of the stream: of one that was cut."""
        return len(self._held)


def _frame_at(source: bytes | bytearray, start: int, limits_of: LimitsOf) -> tuple[Frame, int] | None:
    """Return the frame at an index, and the index behind it; None if it is not complete."""
    left = len(source) - start
    if left and source[start] != VERSION:
        raise WireError(f"the peer sends frames of version {source[start]}; this process reads version {VERSION}")
    if left < _HEADER.size:
        return None
    _, kind, head_bytes, raw_bytes = _HEADER.unpack_from(source, start)
    if head_bytes + raw_bytes > MOST_BYTES:
        raise WireError(f"the peer announces a frame of {head_bytes + raw_bytes} bytes; at most {MOST_BYTES} are read")
    limits = limits_of(kind)
    for name, announced, most in (("head", head_bytes, limits.head), ("block of arrays", raw_bytes, limits.raw)):
        if announced > most:
            raise WireError(
                f"the peer announces a {name} of {announced} bytes in a frame of kind {kind}; at most {most} are read"
            )
    if left < _HEADER.size + head_bytes + raw_bytes:
        return None
    begin = start + _HEADER.size
    middle, end = begin + head_bytes, begin + head_bytes + raw_bytes
    with memoryview(source) as view:
        return Frame(kind, bytes(view[begin:middle]), bytes(view[middle:end])), end
