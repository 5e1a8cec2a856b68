"""Content codings of hosts that compress what was asked for as it is (RFC 9110, section 8.4)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

from staged_pool.runtime.media.files import too_large
from staged_pool.stages.errors import MediaUnavailable, shortened

_GZIP: Final = "gzip"
_DEFLATE: Final = "deflate"
_NAMES: Final = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": _DEFLATE}
_MAGIC: Final = b"\x1f\x8b"
MAX_CODINGS: Final = 2
"""Codings of one answer. Each may make a thousandfold of what it gets."""

_ZLIB_BITS: Final = 15
_GZIP_BITS: Final = 31
_RAW_BITS: Final = -15
MAX_MEMBERS: Final = 16
"""Members of one gzip file. Each one copies what lies behind it."""


def codings(headers: Sequence[str]) -> tuple[str, ...]:
    """Read the `Content-Encoding` headers of an answer, in the order in which the codings were applied.

    Raises:
        MediaUnavailable: One of them cannot be undone here, or there are more than `MAX_CODINGS`.
    """
    names = [name.strip().lower() for header in headers for name in header.split(",")]
    names = [name for name in names if name not in ("", "identity")]
    for name in names:
        if name not in _NAMES:
            raise MediaUnavailable(
                f"The host of the image sent it compressed ({shortened(name)}), which was not asked for."
            )
    if len(names) > MAX_CODINGS:
        raise MediaUnavailable(f"The host of the image compressed it more than {MAX_CODINGS} times.")
    return tuple(_NAMES[name] for name in names)


def unpack(body: bytes, applied: Sequence[str], max_bytes: int) -> bytes:
    """Undo content codings. What a host only calls gzip is returned as it is.

    Args:
        body: As it was sent.
        applied: As `codings` has them.
        max_bytes: Of what comes out, after each coding.

    Raises:
        TooLarge: It unpacks to more.
        MediaUnavailable: It is damaged, or ends early.
    """
    for coding in reversed(applied):
        try:
            body = _gunzipped(body, max_bytes) if coding == _GZIP else _inflated(body, max_bytes)
        except zlib.error:
            raise MediaUnavailable("The host of the image sent it compressed, and damaged.") from None
    return body


def _gunzipped(body: bytes, max_bytes: int) -> bytes:
    """All members of a gzip file, one behind the other (RFC 1952, section 2.2); padding behind them is left out."""
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
    """`deflate` is the zlib format (RFC 9110, section 8.4.1.2); some hosts send the bare one."""
    try:
        return _unpacked(body, _ZLIB_BITS, max_bytes, max_bytes)[0]
    except zlib.error:
        return _unpacked(body, _RAW_BITS, max_bytes, max_bytes)[0]


def _unpacked(body: bytes, bits: int, room: int, max_bytes: int) -> tuple[bytes, bytes]:
    """One stream, and what lies behind it. No more than one byte above the room is ever unpacked."""
    unpacker = zlib.decompressobj(bits)
    unpacked = unpacker.decompress(body, room + 1)
    if len(unpacked) > room:
        raise too_large(max_bytes)
    if not unpacker.eof:
        raise zlib.error("it ends early")
    return unpacked, unpacker.unused_data
