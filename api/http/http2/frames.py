"""HTTP/2 frames before h2 sees them: split, priced, and with bounded settings.

h2 processes all received bytes in one call, which may be 20,000 frames. `FrameCutter` passes it one frame at a time,
with a price. So the reader can pause between frames, and end a connection that only costs.
"""

from __future__ import annotations

from typing import Final

import h2.exceptions
from h2.errors import ErrorCodes

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

FRAME_BYTES: Final = 2**14
"""Maximum payload of a frame: the initial value of HTTP/2 (RFC 9113, section 4.2)."""

HEADER_BLOCK_BYTES: Final = 2**16
"""Maximum size of a block of compressed headers, over all its CONTINUATION frames (CVE-2024-27316)."""

TABLE_BYTES: Final = 4096
"""Maximum size of the table for compressing response headers. A client may offer more, but h2 searches all of it."""

HEADERS_PRICE: Final = 10
"""Units of a HEADERS frame, roughly measured: it starts a request with its tasks. A PING costs one unit."""

SETTINGS_PRICE: Final = 10
"""Units of a SETTINGS frame, which may change the window of every open stream."""

PRICED_BYTES: Final = 256
"""Bytes of a frame that cost one further unit; DATA frames are exempt."""

DATA, HEADERS, SETTINGS, CONTINUATION = 0, 1, 4, 9

_HEAD_BYTES: Final = 9
_ACK: Final = 1
_SETTING_BYTES: Final = 6
_HEADER_TABLE_SIZE: Final = 1
_KNOWN_SETTINGS: Final = frozenset(range(1, 7))
"""SETTINGS_HEADER_TABLE_SIZE to SETTINGS_MAX_HEADER_LIST_SIZE (RFC 9113, section 6.5.2)."""


class FrameCutter:
    """Splits the received bytes of a connection into complete frames."""

    def __init__(self) -> None:
        self._arrived = bytearray()
        self._has_preface = False
        self._block_bytes = 0
        self.price = 0
        """Units of the frame that `next` has returned."""
        self.block_price = 0
        """Units of the latest block of headers, with all its frames so far."""

    def add(self, data: bytes) -> None:
        """Add received bytes."""
        self._arrived += data

    def next(self) -> bytes | None:
        """Return the next complete frame, or the preface; None until more bytes arrive.

        Raises:
            h2.exceptions.ProtocolError: The preface is missing, or a frame or a header block is too long.
        """
        arrived = self._arrived
        if not self._has_preface:
            if not PREFACE.startswith(arrived[: len(PREFACE)]):
                raise h2.exceptions.ProtocolError("no HTTP/2 preface")
            if len(arrived) < len(PREFACE):
                return None
            self._has_preface, self.price = True, 0
            return self._cut(len(PREFACE))
        if len(arrived) < _HEAD_BYTES:
            return None
        length = int.from_bytes(arrived[:3], "big")
        if length > FRAME_BYTES:
            raise h2.exceptions.FrameTooLargeError(f"a frame of {length} bytes; the limit is {FRAME_BYTES}")
        if len(arrived) < _HEAD_BYTES + length:
            return None
        frame = self._cut(_HEAD_BYTES + length)
        self._set_price(kind=frame[3], flags=frame[4], length=length)
        return _bounded(frame) if frame[3] == SETTINGS else frame

    def _cut(self, count: int) -> bytes:
        data = bytes(self._arrived[:count])
        del self._arrived[:count]
        return data

    def _set_price(self, *, kind: int, flags: int, length: int) -> None:
        price = {DATA: 1, HEADERS: HEADERS_PRICE, SETTINGS: SETTINGS_PRICE}.get(kind, 1)
        self.price = price if kind == DATA else price + length // PRICED_BYTES
        if kind == HEADERS:
            self._block_bytes, self.block_price = length, self.price
        elif kind == CONTINUATION:
            self._block_bytes += length
            self.block_price += self.price
            if self._block_bytes > HEADER_BLOCK_BYTES:
                raise EnhanceYourCalm(f"a block of headers of more than {HEADER_BLOCK_BYTES} bytes")


class EnhanceYourCalm(h2.exceptions.ProtocolError):
    """The client's frames cost more than its allowance."""

    error_code = ErrorCodes.ENHANCE_YOUR_CALM


def _bounded(frame: bytes) -> bytes:
    """Remove unknown settings from a SETTINGS frame, and bound its header table by `TABLE_BYTES`.

    h2 keeps every setting of the client as long as the connection lasts, even one that HTTP/2 does not define. And it
    compresses with as large a table as the client offers, which it searches from end to end for each header.
    """
    payload = frame[_HEAD_BYTES:]
    if payload and frame[4] & _ACK:
        raise h2.exceptions.FrameDataMissingError("an acknowledgement of SETTINGS has a payload")
    if len(payload) % _SETTING_BYTES or frame[4] & _ACK:
        return frame  # malformed, or empty
    kept = bytearray()
    for at in range(0, len(payload), _SETTING_BYTES):
        name, value = int.from_bytes(payload[at : at + 2], "big"), int.from_bytes(payload[at + 2 : at + 6], "big")
        if name in _KNOWN_SETTINGS:
            value = min(value, TABLE_BYTES) if name == _HEADER_TABLE_SIZE else value
            kept += name.to_bytes(2, "big") + value.to_bytes(4, "big")
    return len(kept).to_bytes(3, "big") + frame[3:_HEAD_BYTES] + kept
