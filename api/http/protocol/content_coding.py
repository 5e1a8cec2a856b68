"""Content codings of request bodies (RFC 9110, section 8.4), undone within the limits on bodies."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final

import anyio
import anyio.to_thread

from staged_pool.api import status
from staged_pool.api.asgi import Headers
from staged_pool.api.http.protocol.bodies import Body
from staged_pool.api.limits.server_state import ServerState
from staged_pool.api.status import HttpError
from staged_pool.stages.errors import shortened

GZIP: Final = b"gzip"
DEFLATE: Final = b"deflate"
_NAMES: Final = {b"gzip": GZIP, b"x-gzip": GZIP, b"deflate": DEFLATE}
_PLAIN: Final = (b"", b"identity")

MAX_MEMBERS: Final = 16
"""Members of one gzip body. Each one may be 20 bytes that unpack to nothing."""

AT_ONCE_BYTES: Final = 2**16
"""A body that unpacks to so many bytes, and no more, is unpacked on the event loop, in tenths of a millisecond."""

SLICE_BYTES: Final = 2**20
"""Bytes that one call in a thread unpacks. The limits are asked between two calls."""

PIECE_BYTES: Final = 2**16
"""Bytes of a compressed body that zlib gets in one call."""

_GZIP_BITS: Final = 31
_ZLIB_BITS: Final = 15
_RAW_BITS: Final = -15
_ALLOWED: Final = "only gzip and deflate are undone, once; or send the body as it is"


def coding_of(headers: Headers) -> bytes | None:
    """Read how a body is compressed: `GZIP`, `DEFLATE`, or None where it is not.

    Raises:
        HttpError: In another way, or more than once (415).
    """
    given = [value for name, value in headers if name == b"content-encoding"]
    if not given:
        return None
    names = [part.strip().lower() for value in given for part in value.split(b",")]
    names = [name for name in names if name not in _PLAIN]
    if not names:
        return None
    if len(names) > 1 or names[0] not in _NAMES:
        said = shortened(", ".join(name.decode("latin-1") for name in names))
        raise HttpError(status.UNSUPPORTED_CODING, f"Unsupported Content-Encoding '{said}': {_ALLOWED}")
    return _NAMES[names[0]]


async def unpack(
    body: bytes | bytearray, coding: bytes, take: Callable[[int], None], server_state: ServerState
) -> bytes | bytearray:
    """Undo a content coding.

    Args:
        body: As it was sent.
        coding: As `coding_of` has it.
        take: Told of the bytes of each slice as it comes; raises where they exceed a limit. No more than one slice
            beyond a limit is ever unpacked.
        server_state: Has the limiter of the thread.

    Raises:
        HttpError: It is damaged, ends early, or something follows it (400); or what `take` raises.
    """
    if not body:
        return body
    unpacker = _Unpacker(body, coding)
    unpacked = Body()
    piece = unpacker.unpack(AT_ONCE_BYTES)
    while True:
        take(len(piece))
        unpacked.add(piece)
        if unpacker.ended:
            return await unpacked.whole(server_state)
        piece = await anyio.to_thread.run_sync(unpacker.unpack, SLICE_BYTES, limiter=server_state.joining)


class _Unpacker:
    """A compressed body that is undone piece by piece.

    Args:
        body: As it was sent.
        coding: As `coding_of` has it.
    """

    def __init__(self, body: bytes | bytearray, coding: bytes) -> None:
        self._body = memoryview(body)
        self._at = 0
        """Bytes of the body that zlib has used."""
        self._coding = coding
        self._members = MAX_MEMBERS if coding == GZIP else 1
        self._bits = _bits(body, coding)
        self._stream = zlib.decompressobj(self._bits)
        self.ended = False
        """All of it is undone."""

    def unpack(self, most: int) -> bytes:
        """Undo the next bytes, at most `most` and seldom much fewer.

        Raises:
            HttpError: The body is damaged, ends early, or something follows it.
        """
        pieces: list[bytes] = []
        room = most
        while room and not self.ended:
            try:
                pieces.append(self._step(room))
            except zlib.error:
                what = f"it is no {self._coding.decode()}, is damaged, or ends early"
                message = f"The body is not what its Content-Encoding says: {what}"
                raise HttpError(status.BAD_CODING, message) from None
            room -= len(pieces[-1])
        return b"".join(pieces)

    def _step(self, room: int) -> bytes:
        """Give zlib the next piece of the body. It copies what it does not use: hence a piece."""
        packed = self._body[self._at : self._at + PIECE_BYTES]
        piece = self._stream.decompress(packed, room)
        left = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail
        used = len(packed) - len(left)
        self._at += used
        if self._stream.eof:
            self._next_member()
        elif not used and not piece:
            raise zlib.error("it ends early")
        return piece

    def _next_member(self) -> None:
        """A gzip file may have several, one behind the other (RFC 1952, section 2.2)."""
        self._members -= 1
        self.ended = self._at == len(self._body)
        if not self.ended:
            if not self._members:
                raise zlib.error("something follows it")
            self._stream = zlib.decompressobj(self._bits)


def _bits(packed: bytes | bytearray, coding: bytes) -> int:
    """Name a format to zlib. `deflate` is the zlib format (RFC 9110, section 8.4.1.2); some send the bare one."""
    if coding == GZIP:
        return _GZIP_BITS
    is_zlib = packed[0] & 0x0F == zlib.DEFLATED and int.from_bytes(packed[:2], "big") % 31 == 0
    return _ZLIB_BITS if is_zlib else _RAW_BITS
