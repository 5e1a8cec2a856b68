"""The limits of requests, and what they hold of them: the same for both paths through the server."""

from __future__ import annotations

from types import TracebackType
from typing import Final

from staged_pool.api import status
from staged_pool.api.asgi import Scope
from staged_pool.api.config import ServerConfig
from staged_pool.api.status import HttpRefusal, Problem
from staged_pool.api.traffic import Traffic

TARGET_LIMIT_BYTES: Final = 2**13
"""Of path and query. No route needs a hundredth of it."""


class RequestLimits:
    """Says which requests exceed a limit, and counts what the others hold.

    Args:
        config: The limits.
        traffic: Where requests and their bodies are counted.
    """

    def __init__(self, config: ServerConfig, traffic: Traffic) -> None:
        self.config = config
        self.traffic = traffic

    def check_head(self, scope: Scope) -> None:
        """Check what the head alone shows, before any of the body is read.

        Raises:
            HttpRefusal: A limit is exceeded, or two servers in a row may disagree on where the body ends.
        """
        config, headers = self.config, scope["headers"]
        if len(scope.get("raw_path", b"")) + len(scope.get("query_string", b"")) > TARGET_LIMIT_BYTES:
            message = f"The path and query are longer than {TARGET_LIMIT_BYTES} bytes"
            raise HttpRefusal(status.TARGET_TOO_LONG, message)
        if len(headers) > config.header_limit or sum(map(_size, headers)) > config.header_limit_bytes:
            message = f"More than {config.header_limit} headers, or {config.header_limit_bytes} bytes of them"
            raise HttpRefusal(status.HEADERS_TOO_LARGE, message)
        fields = dict(headers)
        length = fields.get(b"content-length")
        if length is None:
            return
        if b"transfer-encoding" in fields:  # the way requests are smuggled
            message = "Transfer-Encoding and Content-Length exclude each other"
            raise HttpRefusal(status.BAD_FRAMING, message)
        if not length.isdigit():
            raise HttpRefusal(status.BAD_FRAMING, "Content-Length is not a number")
        if len(length) > 18 or int(length) > config.body_limit_bytes:
            raise self.body_too_large()

    def body_too_large(self) -> HttpRefusal:
        message = f"The body is larger than this server's limit of {self.config.body_limit_bytes} bytes"
        return HttpRefusal(status.BODY_TOO_LARGE, message)

    def too_many(self) -> Problem | None:
        """The problem of one request more than may be handled at once; None while there is room."""
        if self.traffic.requests < self.config.max_http_requests:
            return None
        message = f"The server handles as many requests at once as it may: {self.config.max_http_requests}"
        return Problem(row=status.TOO_MANY_REQUESTS, message=message, retry_after_s=1.0)

    def has_room(self, body_bytes: int) -> bool:
        """All bodies together may have so many bytes more."""
        return self.traffic.body_bytes + body_bytes <= self.config.bodies_limit_bytes

    def hold(self) -> Held:
        """Make the account of one request: counted from when the block begins to its end."""
        return Held(self)


class Held:
    """What one request holds; given back when the block ends."""

    __slots__ = ("_bytes", "_limits", "_packed")

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._bytes = self._packed = 0

    def __enter__(self) -> Held:
        self._limits.traffic.requests += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()
        self._limits.traffic.requests -= 1

    def count(self, count: int) -> None:
        """Count bytes of a body that there is room for."""
        self._bytes += count
        self._limits.traffic.body_bytes += count

    def take(self, count: int) -> None:
        """Count bytes of a body.

        Raises:
            HttpRefusal: It has more than one body may have, or all bodies together have.
        """
        limits = self._limits
        self.count(count)
        if self._bytes > limits.config.body_limit_bytes:
            raise limits.body_too_large()
        if not limits.has_room(0):
            message = "The server holds as many bytes of request bodies as it may"
            raise HttpRefusal(status.BODIES_TOO_LARGE, message, retry_after_s=1.0)

    def begin_to_unpack(self) -> None:
        """Count from now on what its body unpacks to, under a limit of its own."""
        self._packed, self._bytes = self._bytes, 0

    def give_back(self, *, packed_only: bool = False) -> None:
        """Count its bytes no more: those that were unpacked, or all."""
        kept = self._bytes if packed_only else 0
        self._limits.traffic.body_bytes -= self._packed + self._bytes - kept
        self._bytes, self._packed = kept, 0


def _size(header: tuple[bytes, bytes]) -> int:
    return len(header[0]) + len(header[1])
