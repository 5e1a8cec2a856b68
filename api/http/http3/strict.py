"""aioquic's HTTP/3 connection, made to survive malformed requests.

It is imported only if HTTP/3 is served, since aioquic is optional.
"""

from __future__ import annotations

from typing import Any, Final

import pylsqpack
from aioquic.h3.connection import (
    ErrorCode,
    FrameType,
    H3Connection,
    H3Stream,
    ProtocolError,
    Setting,
    encode_settings,
    parse_settings,
)
from aioquic.h3.events import H3Event
from aioquic.quic.connection import QuicConnection

HEAD_BYTES: Final = 2**16
"""Maximum bytes of a compressed head; aioquic itself buffers a head of any length."""

_TABLES: Final = (Setting.QPACK_MAX_TABLE_CAPACITY, Setting.QPACK_BLOCKED_STREAMS)
_OF_STREAMS: Final = frozenset((ErrorCode.H3_MESSAGE_ERROR, ErrorCode.H3_REQUEST_INCOMPLETE))


class StrictHttp3(H3Connection):
    """One connection, which compresses heads by QPACK's static table alone.

    With dynamic tables a client would decide how much memory its connection takes. It could expand 64 KB to a head of
    250 MB, and make its streams wait for each other.
    """

    def __init__(self, quic: QuicConnection) -> None:
        self.malformed: list[tuple[int, int]] = []
        """Ids and error codes of streams with malformed requests; the caller takes them from the list."""
        self._broken: set[int] = set()
        super().__init__(quic)
        self._decoder = pylsqpack.Decoder(0, 0)

    def _get_local_settings(self) -> dict[int, int]:
        return {**super()._get_local_settings(), **dict.fromkeys(_TABLES, 0)}

    def _handle_control_frame(self, frame_type: int, frame_data: bytes) -> None:
        if frame_type == FrameType.SETTINGS:
            frame_data = encode_settings({**parse_settings(frame_data), **dict.fromkeys(_TABLES, 0)})
        super()._handle_control_frame(frame_type, frame_data)

    def _receive_request_or_push_data(self, stream: H3Stream, data: bytes, stream_ended: bool) -> list[H3Event]:
        if stream.stream_id in self._broken:
            return []
        if stream.frame_type != FrameType.DATA and len(stream.buffer) + len(data) > HEAD_BYTES:
            return self._break(stream, ErrorCode.H3_EXCESSIVE_LOAD)
        try:
            events: list[Any] = super()._receive_request_or_push_data(stream, data, stream_ended)
        except ProtocolError as error:
            if error.error_code not in _OF_STREAMS:
                raise
            return self._break(stream, error.error_code)
        return events

    def _break(self, stream: H3Stream, code: int) -> list[H3Event]:
        stream.buffer = b""
        self._broken.add(stream.stream_id)
        self.malformed.append((stream.stream_id, int(code)))
        return []
