"""HTTP/2 frames before anything understands them: cut apart, priced and, where a peer's number would cost us, cut down.

h2 takes whatever has arrived in one call, which may be twenty thousand frames. So `FrameCutter` hands it one frame at a
time, with a price: whoever reads the connection can rest between frames, and end a connection that only costs.
"""

from __future__ import annotations

from typing import Final

import h2.exceptions
from h2.errors import ErrorCodes

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

FRAME_BYTES: Final = 2**14
"""The longest frame that is taken, without its head: what HTTP/2 begins with (RFC 9113, section 4.2)."""

HEADER_BLOCK_BYTES: Final = 2**16
"""The longest block of compressed headers, over all its CONTINUATION frames (CVE-2024-27316)."""

TABLE_BYTES: Final = 4096
"""The most that answers are compressed with. A larger table is the client's to offer and ours to search."""

HEADERS_PRICE: Final = 10
"""A head begins a request, with its tasks, and other frames do not. In the price of a PING, measured roughly."""

SETTINGS_PRICE: Final = 10
"""It may change the window of every open stream."""

PRICED_BYTES: Final = 256
"""So many bytes of a frame that is no DATA cost as much as another PING."""

DATA, HEADERS, SETTINGS, CONTINUATION = 0, 1, 4, 9

_HEAD_BYTES: Final = 9
_ACK: Final = 1
_SETTING_BYTES: Final = 6
_HEADER_TABLE_SIZE: Final = 1
_KNOWN_SETTINGS: Final = frozenset(range(1, 7))
"""SETTINGS_HEADER_TABLE_SIZE to SETTINGS_MAX_HEADER_LIST_SIZE (RFC 9113, section 6.5.2)."""


class FrameCutter:
    """Cuts what arrives on a connection into whole frames."""

    def __init__(self) -> None:
        self._arrived = bytearray()
        self._has_preface = False
        self._block_bytes = 0
        self.price = 0
        """Of the frame that `next` has returned."""
        self.block_price = 0
        """Of the latest block of headers, with all its frames so far."""

    def add(self, data: bytes) -> None:
        """Take what has arrived."""
        self._arrived += data

    def next(self) -> bytes | None:
        """Return the next whole frame, or the preface; None until more has arrived.

        Raises:
            h2.exceptions.ProtocolError: The connection is over: no preface, or a frame or header block too long.
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
            raise h2.exceptions.FrameTooLargeError(f"a frame of {length} bytes, and {FRAME_BYTES} are taken")
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
                raise TooMuch(f"a block of headers of more than {HEADER_BLOCK_BYTES} bytes")


class TooMuch(h2.exceptions.ProtocolError):
    """The peer costs more than it brings."""

    error_code = ErrorCodes.ENHANCE_YOUR_CALM


def _bounded(frame: bytes) -> bytes:
    """Make a SETTINGS frame without settings that nobody knows, and without a table larger than is used.

    h2 keeps each setting it is sent, also those that HTTP/2 does not know, for as long as the connection lasts. And it
    compresses with as large a table as the peer offers, which is searched from end to end for each header.
    """
    payload = frame[_HEAD_BYTES:]
    if payload and frame[4] & _ACK:
        raise h2.exceptions.FrameDataMissingError("SETTINGS are acknowledged with a payload")
    if len(payload) % _SETTING_BYTES or frame[4] & _ACK:
        return frame  # malformed, or empty
    kept = bytearray()
    for at in range(0, len(payload), _SETTING_BYTES):
        name, value = int.from_bytes(payload[at : at + 2], "big"), int.from_bytes(payload[at + 2 : at + 6], "big")
        if name in _KNOWN_SETTINGS:
            value = min(value, TABLE_BYTES) if name == _HEADER_TABLE_SIZE else value
            kept += name.to_bytes(2, "big") + value.to_bytes(4, "big")
    return len(kept).to_bytes(3, "big") + frame[3:_HEAD_BYTES] + kept
