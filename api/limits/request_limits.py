"""The limits of requests, and what they hold of them: the same for both paths through the server."""

from __future__ import annotations

from collections.abc import Hashable
from types import TracebackType
from typing import Final

from staged_pool.api import status
from staged_pool.api.asgi import Scope
from staged_pool.api.config import ServerConfig
from staged_pool.api.keys import OPEN, TENANT
from staged_pool.api.limits.allowance import client_of
from staged_pool.api.limits.connection_limit import connection_of
from staged_pool.api.limits.server_state import ServerState
from staged_pool.api.status import HttpError, Problem
from staged_pool.runtime.memory.budget import ByteAccount
from staged_pool.runtime.memory.governor import Pressure

TARGET_LIMIT_BYTES: Final = 2**13
"""Of path and query. No route needs a hundredth of it."""

PROBE_BODY_BYTES: Final = 2**12
"""Of a body on a path that is open to everyone. No probe sends any."""

SMALL_BODY_BYTES: Final = 2**16
"""Up to this size a body is let in as long as there is room at all, whatever its party holds already."""


class RequestLimits:
    """Says which requests exceed a limit, and counts what the others hold.

    Args:
        config: The limits.
        server_state: Where requests and their bodies are counted.
    """

    def __init__(self, config: ServerConfig, server_state: ServerState) -> None:
        self.config = config
        self.server_state = server_state
        self._requests = ByteAccount(config.max_http_requests)  # of requests, which are shared like bytes
        self._bodies = server_state.memory.budget.bodies

    def check_head(self, scope: Scope) -> None:
        """Check what the head alone shows, before any of the body is read.

        Raises:
            HttpError: A limit is exceeded, or two servers in a row may disagree on where the body ends.
        """
        config, headers = self.config, scope["headers"]
        if len(scope.get("raw_path", b"")) + len(scope.get("query_string", b"")) > TARGET_LIMIT_BYTES:
            message = f"The path and query are longer than {TARGET_LIMIT_BYTES} bytes"
            raise HttpError(status.TARGET_TOO_LONG, message)
        if len(headers) > config.header_limit or sum(map(_size, headers)) > config.header_limit_bytes:
            message = f"More than {config.header_limit} headers, or {config.header_limit_bytes} bytes of them"
            raise HttpError(status.HEADERS_TOO_LARGE, message)
        fields = dict(headers)
        length = fields.get(b"content-length")
        if length is None:
            return
        if b"transfer-encoding" in fields:  # the way requests are smuggled
            message = "Transfer-Encoding and Content-Length exclude each other"
            raise HttpError(status.BAD_FRAMING, message)
        if not length.isdigit():
            raise HttpError(status.BAD_FRAMING, "Content-Length is not a number")
        limit_bytes = self.body_limit_bytes(scope)
        if len(length) > 18 or int(length) > limit_bytes:
            raise body_too_large(limit_bytes)

    def body_limit_bytes(self, scope: Scope) -> int:
        """Bytes that the body of a request may have: few where it needs no key."""
        limit_bytes = min(self.config.body_limit_bytes, self._bodies.limit_bytes)
        return min(limit_bytes, PROBE_BODY_BYTES) if is_open(scope) else limit_bytes

    def too_many(self, scope: Scope) -> Problem | None:
        """The problem of one request more than may be handled at once; None while there is room for its party."""
        memory = self.server_state.memory
        if memory.pressure >= Pressure.REJECT:
            return status.problem(memory.rejection())
        if self._requests.has_room(1, party_of(scope)):
            return None
        message = f"The server handles as many requests at once as it may: {self.config.max_http_requests}"
        return Problem(row=status.TOO_MANY_REQUESTS, message=message, retry_after_s=1.0)

    def too_many_connections(self, scope: Scope) -> Problem | None:
        """The problem of a request on a connection beyond their limit; None where it is within it."""
        member = connection_of(scope)
        if member is None or not self.server_state.limit.is_extra(member):
            return None
        message = "The server has as many connections as it may, at all or from this address; only probes are answered"
        return Problem(row=status.TOO_MANY_CONNECTIONS, message=message, retry_after_s=1.0)

    def has_room(self, body_bytes: int, scope: Scope, held_bytes: int = 0) -> bool:
        """True where the party of a request may hold so many bytes more of bodies.

        Args:
            body_bytes: Bytes more.
            scope: Of the request.
            held_bytes: Bytes that the request holds already.
        """
        bodies = self._bodies
        if not body_bytes:
            return True
        if held_bytes + body_bytes <= SMALL_BODY_BYTES:
            return bodies.held_bytes + body_bytes <= bodies.limit_bytes
        return bodies.has_room(body_bytes, party_of(scope))

    def hold(self, scope: Scope) -> Held:
        """Make the account of one request: counted from when the block begins to its end."""
        return Held(self, scope)


class Held:
    """What one request holds; given back when the block ends."""

    __slots__ = ("_arrived", "_body", "_limits", "_packed", "_request", "_scope")

    def __init__(self, limits: RequestLimits, scope: Scope) -> None:
        party = party_of(scope)
        self._limits = limits
        self._scope = scope
        self._request = limits._requests.hold(party)
        self._packed = limits._bodies.hold(party)
        self._body = limits._bodies.hold(party)
        self._arrived = 0

    def __enter__(self) -> Held:
        self._limits.server_state.requests += 1
        self._request.add(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()
        self._request.give_back()
        self._limits.server_state.requests -= 1

    def announce(self, count: int) -> None:
        """Hold the bytes of a body before they arrive. What arrives is counted as part of them.

        Raises:
            HttpError: There is no room for them.
        """
        if not self._limits.has_room(count, self._scope, self._body.held_bytes):
            self._limits._bodies.rejected += 1
            raise bodies_too_large()
        self.keep(count)

    def keep(self, count: int) -> None:
        """Count bytes of a body that are here already, with or without room."""
        self._body.add(count)

    def take(self, count: int) -> None:
        """Count bytes of a body that arrive.

        Raises:
            HttpError: It has more than one body may have, or there is no room for it.
        """
        self._arrived += count
        limit_bytes = self._limits.body_limit_bytes(self._scope)
        if self._arrived > limit_bytes:
            raise body_too_large(limit_bytes)
        if (more := self._arrived - self._body.held_bytes) > 0:
            self.announce(more)

    def begin_to_unpack(self) -> None:
        """Count from now on what its body unpacks to, under a limit of its own."""
        self._packed, self._body = self._body, self._packed
        self._arrived = 0

    def give_back(self, *, packed_only: bool = False) -> None:
        """Count its bytes no more: those that were unpacked, or all."""
        self._packed.give_back()
        if not packed_only:
            self._body.give_back()


def is_open(scope: Scope) -> bool:
    """Tell if a request is for a path that probes ask: it needs no key, and is answered however full the server is."""
    return scope.get("path") in OPEN


def party_of(scope: Scope) -> Hashable:
    """The party that what a request holds counts for: its tenant, or else the client's address."""
    tenant: str | None = scope.get(TENANT)
    if tenant is not None:
        return tenant
    client = scope.get("client")
    return ("address", client_of(client)) if client else None


def announced_bytes(scope: Scope) -> int:
    """The length of a body that its head has told, and `check_head` has checked; 0 where there is none."""
    return int(dict(scope["headers"]).get(b"content-length", 0))


def body_too_large(limit_bytes: int) -> HttpError:
    message = f"The body is larger than the limit of {limit_bytes} bytes"
    return HttpError(status.BODY_TOO_LARGE, message)


def bodies_too_large() -> HttpError:
    message = "The server holds as many bytes of request bodies as it may"
    return HttpError(status.BODIES_TOO_LARGE, message, retry_after_s=1.0)


def _size(header: tuple[bytes, bytes]) -> int:
    return len(header[0]) + len(header[1])
