"""Limits of requests and the account of their use, for both paths through the server."""

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
from staged_pool.api.limits.uploads import FILES, UPLOAD_BYTES
from staged_pool.api.status import HttpError, Problem
from staged_pool.runtime.memory.budget import ByteAccount
from staged_pool.runtime.memory.governor import Pressure

TARGET_LIMIT_BYTES: Final = 2**13
"""Maximum bytes of path and query. No route needs a hundredth of it."""

PROBE_BODY_BYTES: Final = 2**12
"""Maximum bytes of a body on a path that needs no key. Probes send no body."""

SMALL_BODY_BYTES: Final = 2**16
"""Bytes up to which a body needs free memory, but no share of its tenant."""


class RequestLimits:
    """Limits of one server: rejects requests that exceed one, and counts the resources of the others.

    Args:
        config: The limits.
        server_state: Counts requests and their bodies.
    """

    def __init__(self, config: ServerConfig, server_state: ServerState) -> None:
        self.config = config
        self.server_state = server_state
        self._requests = ByteAccount(config.max_http_requests)  # counts requests, shared by the same rule as bytes
        self._bodies = server_state.memory.budget.bodies

    def check_head(self, scope: Scope) -> None:
        """Check the head of a request, before any of its body is read.

        Raises:
            HttpError: A limit is exceeded, or the end of the body is ambiguous to a chain of servers.
        """
        config, headers = self.config, scope["headers"]
        if len(scope.get("raw_path", b"")) + len(scope.get("query_string", b"")) > TARGET_LIMIT_BYTES:
            message = f"The path and query are longer than {TARGET_LIMIT_BYTES} bytes"
            raise HttpError(status.TARGET_TOO_LONG, message)
        if (
            len(headers) > config.header_limit
            or sum([len(name) + len(value) for name, value in headers]) > config.header_limit_bytes
        ):
            message = f"More than {config.header_limit} headers, or {config.header_limit_bytes} bytes of them"
            raise HttpError(status.HEADERS_TOO_LARGE, message)
        fields = dict(headers)
        length = fields.get(b"content-length")
        if length is None:
            return
        if b"transfer-encoding" in fields:  # both together allow request smuggling
            message = "Transfer-Encoding and Content-Length exclude each other"
            raise HttpError(status.BAD_FRAMING, message)
        if not length.isdigit():
            raise HttpError(status.BAD_FRAMING, "Content-Length is not a number")
        limit_bytes = self.body_limit_bytes(scope)
        if len(length) > 18 or int(length) > limit_bytes:
            raise body_too_large(limit_bytes)

    def body_limit_bytes(self, scope: Scope) -> int:
        """Return the maximum bytes of a request's body; a path that needs no key has a small limit."""
        if self.is_upload(scope):
            return UPLOAD_BYTES
        limit_bytes = min(self.config.body_limit_bytes, self._bodies.most_bytes)
        return min(limit_bytes, PROBE_BODY_BYTES) if is_open(scope) else limit_bytes

    def is_upload(self, scope: Scope) -> bool:
        """Tell if a request is an upload, whose body is read by its handler."""
        return self.config.batch_dir is not None and (scope["method"], scope["path"]) == ("POST", FILES)

    def too_many(self, scope: Scope) -> Problem | None:
        """Return the problem of a request beyond `max_http_requests`; None while its party has room."""
        memory = self.server_state.memory
        if memory.pressure >= Pressure.REJECT:
            return status.problem(memory.rejection())
        if self._requests.has_room(1, party_of(scope)):
            return None
        message = f"The server already handles its maximum of {self.config.max_http_requests} requests"
        return Problem(kind=status.TOO_MANY_REQUESTS, message=message, retry_after_s=1.0)

    def too_many_connections(self, scope: Scope) -> Problem | None:
        """Return the problem of a request on a connection beyond the limit; None if it is within."""
        member = connection_of(scope)
        if member is None or not self.server_state.limit.is_extra(member):
            return None
        message = "The server has its maximum of connections, in total or from this address; only probes are answered"
        return Problem(kind=status.TOO_MANY_CONNECTIONS, message=message, retry_after_s=1.0)

    def has_room(self, body_bytes: int, scope: Scope, held_bytes: int = 0) -> bool:
        """Tell if the party of a request may hold further bytes of bodies.

        Args:
            body_bytes: Further bytes.
            scope: Scope of the request.
            held_bytes: Bytes that the request holds already.
        """
        bodies = self._bodies
        if not body_bytes:
            return True
        if held_bytes + body_bytes <= SMALL_BODY_BYTES:
            return bodies.held_bytes + body_bytes <= bodies.limit_bytes
        return bodies.has_room(body_bytes, party_of(scope))

    def hold(self, scope: Scope) -> RequestAccount:
        """Return the account of one request, a context manager: the request counts within its block."""
        return RequestAccount(self, scope)


class RequestAccount:
    """Account of one request: its slot and the bytes of its body, returned when the block ends."""

    __slots__ = ("_arrived", "_body", "_limits", "_packed", "_request", "_scope")

    def __init__(self, limits: RequestLimits, scope: Scope) -> None:
        party = party_of(scope)
        self._limits = limits
        self._scope = scope
        self._request = limits._requests.hold(party)
        self._packed = limits._bodies.hold(party)
        self._body = limits._bodies.hold(party)
        self._arrived = 0

    def __enter__(self) -> RequestAccount:
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
        """Reserve the bytes of a body before they arrive; `take` counts arriving bytes against them.

        Raises:
            HttpError: There is no room for them.
        """
        if not self._limits.has_room(count, self._scope, self._body.held_bytes):
            self._limits._bodies.rejected += 1
            raise bodies_too_large()
        self.keep(count)

    def keep(self, count: int) -> None:
        """Count bytes of a body that have arrived already, even if there is no room."""
        self._body.add(count)

    def take(self, count: int) -> None:
        """Count arriving bytes of a body.

        Raises:
            HttpError: The body exceeds the limit of one body, or there is no room for it.
        """
        self._arrived += count
        limit_bytes = self._limits.body_limit_bytes(self._scope)
        if self._arrived > limit_bytes:
            raise body_too_large(limit_bytes)
        if (more := self._arrived - self._body.held_bytes) > 0:
            self.announce(more)

    def begin_to_unpack(self) -> None:
        """Count the decompressed bytes from now on; the limit of one body applies to them anew."""
        self._packed, self._body = self._body, self._packed
        self._arrived = 0

    def give_back(self, *, packed_only: bool = False) -> None:
        """Return all bytes of the body, or only the compressed ones."""
        self._packed.give_back()
        if not packed_only:
            self._body.give_back()


def is_open(scope: Scope) -> bool:
    """Tell if a request is for a path of probes: no key needed, served at any load."""
    return scope.get("path") in OPEN


def party_of(scope: Scope) -> Hashable:
    """Return the party that a request's resources are charged to: its tenant, or else the client's address."""
    tenant: str | None = scope.get(TENANT)
    if tenant is not None:
        return tenant
    client = scope.get("client")
    return ("address", client_of(client)) if client else None


def announced_bytes(scope: Scope) -> int:
    """Return the Content-Length of a head that `check_head` has accepted; 0 if it has none."""
    return int(dict(scope["headers"]).get(b"content-length", 0))


def body_too_large(limit_bytes: int) -> HttpError:
    message = f"The body is larger than the limit of {limit_bytes} bytes"
    return HttpError(status.BODY_TOO_LARGE, message)


def bodies_too_large() -> HttpError:
    message = "The server holds its maximum of bytes of request bodies"
    return HttpError(status.BODIES_TOO_LARGE, message, retry_after_s=1.0)
