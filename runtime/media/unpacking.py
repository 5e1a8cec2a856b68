"""Decoder of content codings, which some hosts apply unasked (RFC 9110, section 8.4)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

from staged_pool.runtime.media.files import too_large
from staged_pool.stages.errors import MediaUnavailable, shortened

_GZIP: Final = "gzip"
_DEFLATE: Final = "deflate"
_NAMES: Final = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": _DEFLATE}
_UNSUPPORTED: Final = frozenset({"br", "zstd", "compress", "x-compress", "dcb", "dcz", "bzip2", "lzma", "xz", "exi"})
"""Codings that change the body, and that nothing here undoes."""
_MAGIC: Final = b"\x1f\x8b"
MAX_CODINGS: Final = 2
"""Limit of codings of one response. Each may unpack to a thousand times its size."""

_ZLIB_BITS: Final = 15
_GZIP_BITS: Final = 31
_RAW_BITS: Final = -15
MAX_MEMBERS: Final = 16
"""Limit of members of one gzip file. Unpacking each copies the rest of the file."""


def codings(headers: Sequence[str]) -> tuple[str, ...]:
    """Parse `Content-Encoding` headers into codings, in the order of their application.

    Names that are no codings are ignored, as browsers do: `aws-chunked` of storage services, `utf-8`, `binary`.

    Raises:
        MediaUnavailable: A coding is not supported, or there are more than `MAX_CODINGS`.
    """
    names = [name.strip().lower() for header in headers for name in header.split(",")]
    for name in names:
        if name in _UNSUPPORTED:
            raise MediaUnavailable(
                f"The host of the image sent it compressed ({shortened(name)}), which was not asked for."
            )
    names = [name for name in names if name in _NAMES]
    if len(names) > MAX_CODINGS:
        raise MediaUnavailable(f"The host of the image compressed it more than {MAX_CODINGS} times.")
    return tuple(_NAMES[name] for name in names)


def unpack(body: bytes, applied: Sequence[str], max_bytes: int) -> bytes:
    """Decode content codings. A body labelled gzip without a gzip header is returned unchanged.

    Args:
        body: The body as received.
        applied: The result of `codings`.
        max_bytes: Largest size after each coding.

    Raises:
        TooLarge: The body unpacks to more.
        MediaUnavailable: The body is damaged, or ends early.
    """
    for coding in reversed(applied):
        try:
            body = _gunzipped(body, max_bytes) if coding == _GZIP else _inflated(body, max_bytes)
        except zlib.error:
            raise MediaUnavailable("The host of the image sent it compressed, and damaged.") from None
    return body


def _gunzipped(body: bytes, max_bytes: int) -> bytes:
    """Unpack all members of a gzip file (RFC 1952, section 2.2), without padding."""
    if not body.startswith(_MAGIC):
        return body
    members: list[bytes] = []
    room = max_bytes
    while body.startswith(_MAGIC) and len(members) < MAX_MEMBERS:
        member, body = _unpacked(body, _GZIP_BITS, room, max_bytes)
        room -= len(member)
        members.append(member)
    return b"".join(members)


def _inflated(body: bytes, max_bytes: int) -> bytes:
    """Unpack `deflate`: the zlib format (RFC 9110, section 8.4.1.2), or raw deflate from some hosts."""
    try:
        return _unpacked(body, _ZLIB_BITS, max_bytes, max_bytes)[0]
    except zlib.error:
        return _unpacked(body, _RAW_BITS, max_bytes, max_bytes)[0]


def _unpacked(body: bytes, bits: int, room: int, max_bytes: int) -> tuple[bytes, bytes]:
    """Unpack one stream to at most `room` bytes. Returns the result, and the data after the stream."""
    unpacker = zlib.decompressobj(bits)
    unpacked = unpacker.decompress(body, room + 1)
    if len(unpacked) > room:
        raise too_large(max_bytes)
    if not unpacker.eof:
        raise zlib.error("it ends early")
    return unpacked, unpacker.unused_data
