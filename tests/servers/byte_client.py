"""Requests and answers as bytes, of which a test decides every one."""

from __future__ import annotations

import json
import re
from typing import Any

import anyio
import anyio.abc
import h2.config
import h2.connection
import h2.events


async def read_to_end(stream: anyio.abc.ByteReceiveStream) -> bytes:
    received = b""
    with anyio.fail_after(30):
        try:
            while True:
                received += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return received


async def read_answer(stream: anyio.abc.ByteReceiveStream) -> bytes:
    """One complete answer with a `Content-Length`, or of the status 204, which has no content."""
    received = b""
    with anyio.fail_after(30):
        while True:
            received += await stream.receive()
            head, end, body = received.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            if end and (head.startswith(b"HTTP/1.1 204 ") or (length and len(body) >= int(length[1]))):
                return received


def post(body: bytes, *headers: str, path: str = "/v1/embeddings") -> bytes:
    """An HTTP/1.1 request; `Content-Length` is among `headers`, or is added."""
    lines = [f"POST {path} HTTP/1.1", "host: test", "content-type: application/json", *headers]
    if not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


EMBED = post(json.dumps({"input": "a"}).encode())


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


class Http2:
    """An HTTP/2 connection of which the test decides every frame."""

    def __init__(self, stream: Any) -> None:
        settings = h2.config.H2Configuration(
            validate_outbound_headers=False, normalize_outbound_headers=False, header_encoding=None
        )
        self.h2 = h2.connection.H2Connection(settings)
        self.h2.initiate_connection()
        self._stream = stream

    async def request(
        self, stream_id: int, *, path: bytes | None, method: bytes = b"POST", body: bytes = b"", ends: bool = True
    ) -> None:
        headers = [(b":method", method), (b":authority", b"test")]
        headers += [(b":scheme", b"http"), (b":path", path)] if path is not None else []
        self.h2.send_headers(stream_id, [*headers, (b"content-type", b"application/json")])
        await self.send(stream_id, body, ends=ends)

    async def send(self, stream_id: int, body: bytes, *, ends: bool) -> None:
        self.h2.send_data(stream_id, body, end_stream=ends)
        await self.flush()

    async def flush(self) -> None:
        await self._stream.send(self.h2.data_to_send())

    async def reset(self, stream_id: int) -> int:
        """Wait until the server resets the stream; its reason."""
        with anyio.fail_after(30):
            while True:
                for event in self.h2.receive_data(await self._stream.receive()):
                    if isinstance(event, h2.events.StreamReset) and event.stream_id == stream_id:
                        return int(event.error_code)

    async def ends(self, *stream_ids: int) -> dict[int, str]:
        """Wait until each stream is answered or reset; the status, or `reset`."""
        outcome: dict[int, str] = {}
        with anyio.fail_after(30):
            while not set(stream_ids) <= set(outcome):
                await self._stream.send(self.h2.data_to_send())
                for event in self.h2.receive_data(await self._stream.receive()):
                    if isinstance(event, h2.events.ResponseReceived):
                        outcome[event.stream_id] = dict(event.headers)[b":status"].decode()
                    elif isinstance(event, h2.events.StreamReset):
                        outcome.setdefault(event.stream_id, "reset")
                    elif isinstance(event, h2.events.DataReceived):
                        self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        return outcome
