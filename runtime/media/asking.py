"""One GET request over one connection: HTTP/1.1 as h11 reads it, and nothing that a client of browsers would add."""

from __future__ import annotations

from typing import Final

import anyio
import anyio.abc
import anyio.lowlevel
import h11

_RECEIVE_BYTES: Final = 2**16


class Asked:
    """A request that has been sent, and the answer as it comes.

    All methods raise `h11.RemoteProtocolError` for what is no HTTP or ends too early, and what the stream raises.
    """

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT)
        self.status = 0
        self._headers: dict[bytes, bytes] = {}

    async def send(self, target: str, headers: list[tuple[str, str]]) -> None:
        """Send the request, and read the head of its answer."""
        request = h11.Request(method="GET", target=target, headers=headers)
        await self._stream.send((self._http.send(request) or b"") + (self._http.send(h11.EndOfMessage()) or b""))
        while not isinstance(event := await self._next(), h11.Response):
            pass  # a word in between, such as 103
        self.status = event.status_code
        for name, value in event.headers:
            self._headers.setdefault(name, value)

    def header(self, name: str) -> str:
        """The first of that name; empty where there is none."""
        return self._headers.get(name.encode(), b"").decode("latin-1")

    async def piece(self) -> bytes | None:
        """The next piece of the body; None at its end."""
        event = await self._next()
        return bytes(event.data) if isinstance(event, h11.Data) else None

    async def _next(self) -> object:
        await anyio.lowlevel.checkpoint()  # what has arrived together is given without one
        while (event := self._http.next_event()) is h11.NEED_DATA:
            try:
                self._http.receive_data(await self._stream.receive(_RECEIVE_BYTES))
            except anyio.EndOfStream:
                self._http.receive_data(b"")
        return event
