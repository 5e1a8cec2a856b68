"""h2's server connection, made to survive malformed streams."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import hpack
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import DataFrame, HeadersFrame

from staged_pool.api.http.http2.frames import HEADER_BLOCK_BYTES

STREAMS: Final = 100
"""Maximum concurrent streams of a connection. The server resets a further one, which the client may send again."""

CLOSED_STREAMS: Final = 2**12
"""Closed streams that are remembered: frames of a stream that was reset may still be on their way."""


class _CompressionError(h2.exceptions.ProtocolError):
    """A header block that cannot be decompressed: all later ones depend on it."""

    error_code = ErrorCodes.COMPRESSION_ERROR


class _Decoder(hpack.Decoder):
    """HPACK decoder that reports each failure as a compression error (RFC 9113, section 4.3)."""

    def decode(self, data: bytes, raw: bool = False) -> Any:
        try:
            return super().decode(data, raw=raw)
        except hpack.OversizedHeaderListError:
            raise
        except (hpack.HPACKError, IndexError, UnicodeDecodeError) as error:
            raise _CompressionError(f"headers that cannot be decompressed: {error}") from None


class StrictConnection(h2.connection.H2Connection):
    """One connection, which resets a malformed stream and lists it in `malformed`.

    `request_head.py` checks heads. Here, other errors on a stream reset it instead of ending the connection.
    """

    MAX_CLOSED_STREAMS = CLOSED_STREAMS

    def __init__(self) -> None:
        super().__init__(
            h2.config.H2Configuration(client_side=False, header_encoding=None, validate_inbound_headers=False)
        )
        self.malformed: list[int] = []
        """Ids of streams that were reset as malformed; the caller takes them from the list."""
        self.decoder = _Decoder()
        self.decoder.max_header_list_size = HEADER_BLOCK_BYTES
        self.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: STREAMS,
                SettingCodes.MAX_HEADER_LIST_SIZE: HEADER_BLOCK_BYTES,
            },
        )

    @property
    def open_inbound_streams(self) -> int:
        """Number of open streams, always below the maximum.

        `Http2` resets a stream beyond the maximum. h2 itself would end the connection.
        """
        count: int = super().open_inbound_streams
        return min(count, STREAMS - 1)

    def _receive_frame(self, frame: Any) -> list[h2.events.Event]:
        stream_id: int = frame.stream_id
        was_closed = stream_id not in self.streams and stream_id <= self.highest_inbound_stream_id
        try:
            events: list[h2.events.Event] = super()._receive_frame(frame)
            return events
        except h2.exceptions.ProtocolError as error:
            is_over = was_closed or self.state_machine.state is h2.connection.ConnectionState.CLOSED
            if is_over or stream_id not in self.streams or not _is_of_stream(frame, error):
                raise
            if length := getattr(frame, "flow_controlled_length", 0):
                self.acknowledge_received_data(length, stream_id)
            with suppress(h2.exceptions.ProtocolError):
                self.reset_stream(stream_id, error.error_code)
            self.malformed.append(stream_id)
            return []


def _is_of_stream(frame: Any, error: h2.exceptions.ProtocolError) -> bool:
    """Tell if an error is about the stream alone: its state, its body's length, or its trailers."""
    own = (h2.exceptions.ProtocolError, h2.exceptions.InvalidBodyLengthError, h2.exceptions.StreamClosedError)
    return type(error) in own and isinstance(frame, HeadersFrame | DataFrame)
