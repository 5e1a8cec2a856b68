"""Decompression of request bodies (Content-Encoding, RFC 9110, section 8.4), within their limits."""

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
"""Maximum members of a gzip body: a member of 20 bytes may decompress to nothing."""

INLINE_BYTES: Final = 2**16
"""Bytes decompressed on the event loop, in tenths of a millisecond; a thread decompresses the rest."""

SLICE_BYTES: Final = 2**20
"""Bytes that one call in a thread decompresses; the limits are checked between calls."""

INFLATE_CHUNK_BYTES: Final = 2**16
"""Compressed bytes that zlib gets in one call."""

_GZIP_BITS: Final = 31
_ZLIB_BITS: Final = 15
_RAW_BITS: Final = -15
_ALLOWED: Final = "expected one of gzip and deflate, or a body without compression"


def coding_of(headers: Headers) -> bytes | None:
    """Return the content coding of a body: `GZIP`, `DEFLATE`, or None if it is not compressed.

    Raises:
        HttpError: It is another coding, or several (415).
    """
    given = [value for name, value in headers if name == b"content-encoding"]
    if not given:
        return None
    names = [part.strip().lower() for value in given for part in value.split(b",")]
    names = [name for name in names if name not in _PLAIN]
    if not names:
        return None
    if len(names) > 1 or names[0] not in _NAMES:
        shown = shortened(", ".join(name.decode("latin-1") for name in names))
        raise HttpError(status.UNSUPPORTED_CODING, f"Unsupported Content-Encoding '{shown}': {_ALLOWED}")
    return _NAMES[names[0]]


async def unpack(
    body: bytes | bytearray, coding: bytes, take: Callable[[int], None], server_state: ServerState
) -> bytes | bytearray:
    """Decompress a body.

    Args:
        body: The compressed body.
        coding: Its coding, as returned by `coding_of`.
        take: Called with the size of each decompressed slice; raises if a limit is exceeded. At most one slice beyond
            a limit is ever decompressed.
        server_state: Has the limiter of the thread.

    Raises:
        HttpError: The body is damaged, incomplete, or followed by other bytes (400). Errors of `take` pass.
    """
    if not body:
        return body
    unpacker = _Unpacker(body, coding)
    unpacked = Body()
    piece = unpacker.unpack(INLINE_BYTES)
    while True:
        take(len(piece))
        unpacked.add(piece)
        if unpacker.ended:
            return await unpacked.whole(server_state)
        piece = await anyio.to_thread.run_sync(unpacker.unpack, SLICE_BYTES, limiter=server_state.joining)


class _Unpacker:
    """A compressed body that is decompressed piece by piece.

    Args:
        body: The compressed body.
        coding: Its coding, as returned by `coding_of`.
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
        """True once the whole body is decompressed."""

    def unpack(self, most: int) -> bytes:
        """Return the next decompressed bytes: `most` of them, or fewer at the end.

        Raises:
            HttpError: The body is damaged, incomplete, or followed by other bytes.
        """
        pieces: list[bytes] = []
        room = most
        while room and not self.ended:
            try:
                pieces.append(self._step(room))
            except zlib.error:
                what = f"it is not {self._coding.decode()}, is damaged, or ends early"
                message = f"The body does not match its Content-Encoding: {what}"
                raise HttpError(status.BAD_CODING, message) from None
            room -= len(pieces[-1])
        return b"".join(pieces)

    def _step(self, room: int) -> bytes:
        """Pass zlib the next piece of the body, not all of it: zlib copies the bytes that it does not use."""
        packed = self._body[self._at : self._at + INFLATE_CHUNK_BYTES]
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
        """Begin the next member, if any: gzip allows several in sequence (RFC 1952, section 2.2)."""
        self._members -= 1
        self.ended = self._at == len(self._body)
        if not self.ended:
            if not self._members:
                raise zlib.error("other bytes follow it")
            self._stream = zlib.decompressobj(self._bits)


def _bits(packed: bytes | bytearray, coding: bytes) -> int:
    """Return zlib's `wbits` for a body.

    `deflate` means the zlib format (RFC 9110, section 8.4.1.2), but some clients send raw deflate data.
    """
    if coding == GZIP:
        return _GZIP_BITS
    is_zlib = packed[0] & 0x0F == zlib.DEFLATED and int.from_bytes(packed[:2], "big") % 31 == 0
    return _ZLIB_BITS if is_zlib else _RAW_BITS
