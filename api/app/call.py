"""One HTTP request as a handler gets it, and its answer."""

from __future__ import annotations

import math
import re
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import getrandbits
from typing import BinaryIO, Final, TypeAlias

from staged_pool.api import status
from staged_pool.api.addresses import MODEL, OBJECT
from staged_pool.api.asgi import Headers, Message, Receive, Scope, Send
from staged_pool.api.config import MAX_TIMEOUT_S
from staged_pool.api.keys import OWNER, TENANT
from staged_pool.api.status import HttpError, Problem
from staged_pool.api.tracing.trace_context import trace_parent, written
from staged_pool.api.tracing.tracer import RequestTrace
from staged_pool.api.wire.chunked_json import Pieces, pieces_of, size_of
from staged_pool.api.wire.exchange import JSON
from staged_pool.api.wire.forms import boundary_of
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.memory.answers import AnswerMemory
from staged_pool.stages.errors import ENGINE_WORDS, Abandoned, InvalidInput, Words
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.timeline import Timeline

FORM: Final = b"multipart/form-data"
_JSON_ONLY: Final = "Unsupported Media Type: Only 'application/json' is allowed"

ENGINE: Final = "staged_pool.engine"
"""Key in a scope: the engine that the front door has chosen; absent while several are possible."""

PATH_TAKEN: Final = "staged_pool.path_taken"
"""Key in a scope: the request's path through the server, `fast`; absent on the general path."""

ErrorFormat: TypeAlias = Callable[[Problem], tuple[int, bytes]]
"""Error format of a dialect: converts a problem to the status and body of the answer."""

_PREFERRED_WAIT: Final = re.compile(rb"(?:^|[,;]) *wait *= *\"?([^\",; ]*)", re.IGNORECASE)  # RFC 7240, section 4.3
_PRIORITIES: Final = {priority.encode(): priority for priority in Priority}
_BACKGROUND: Final = re.compile(rb"(?:^|,)[ \t]*u=7[ \t]*(?:$|[,;])")
NDJSON: Final = b"application/x-ndjson"
LIVE: Final = "/stages/live"
"""Path of the live feed."""
PLUGINS: Final = "/plugins/"
"""Prefix of the routes of plugins."""
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file that is open for reading, and its bytes."""

    file: BinaryIO
    size: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer, complete."""

    body: Pieces = b""
    status: int = 200
    content_type: bytes = JSON
    headers: Headers = field(default_factory=list)
    word: str | None = None
    """Name of the problem in the log, if this answers one."""
    reason: str | None = None
    """Message of a problem that passes by itself, for the log."""
    file: OpenFile | None = None
    """Body that is a file, instead of `body`; it is closed once it is sent."""
    sent_bytes: int | None = None
    """Bytes of the body, if the handler has sent the answer itself; None: the answer is to be sent."""

    @property
    def size(self) -> int:
        """Bytes of the body."""
        if self.sent_bytes is not None:
            return self.sent_bytes
        return size_of(self.body) if self.file is None else self.file.size

    @property
    def pieces(self) -> tuple[bytes, ...]:
        """The body in the pieces in which it is sent."""
        return pieces_of(self.body)

    @staticmethod
    def of(problem: Problem, error_format: ErrorFormat) -> Answer:
        status, body = error_format(problem)
        return Answer(body, status, headers=problem.headers(), word=problem.kind.word, reason=problem.reason)


class Lines:
    """An answer that is sent line by line; its head is sent with the first line.

    Args:
        send: ASGI's `send` of the request.
        headers: Makes the headers of the answer, without a length, which is unknown.
    """

    def __init__(self, send: Send, headers: Callable[[], Headers]) -> None:
        self._send = send
        self._headers = headers
        self.content_type = NDJSON
        self.further: Headers = []
        """Headers of this answer alone."""
        self.is_endless = False
        """True: the answer goes on until its client leaves, and that is no failure."""
        self.begun = False
        self.sent_bytes = 0

    async def give(self, lines: bytes) -> None:
        """Send complete lines. It waits for a client that reads slowly."""
        if not self.begun:
            self.begun = True
            headers = [(b"content-type", self.content_type), *self.further, *self._headers()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self.sent_bytes += len(lines)
        await self._send({"type": "http.response.body", "body": lines, "more_body": True})

    async def end(self, last: bytes) -> None:
        """Send the last line."""
        self.sent_bytes += len(last) + 1
        await self._send({"type": "http.response.body", "body": last + b"\n"})


class Call:
    """One request, as its handler gets it."""

    __slots__ = (
        "_body_ended",
        "_receive",
        "answer",
        "body_bytes",
        "error_format",
        "headers",
        "lines",
        "model",
        "operation",
        "request_id",
        "route",
        "scope",
        "timeline",
        "times_ms",
        "trace",
        "words",
    )

    def __init__(self, scope: Scope, receive: Receive, error_format: ErrorFormat, answer: AnswerMemory) -> None:
        self.scope = scope
        self.answer = answer
        """Memory of the answer, until it is sent. Every engine that works for the request gets it."""
        self.lines: Lines | None = None
        """Sends an answer line by line. None: the answer is made without a handler."""
        self.error_format = error_format
        """Error format of the client's dialect."""
        self.words: Words = ENGINE_WORDS
        """The client's names for the fields of its request, once the body is read."""
        self._receive = receive
        self._body_ended = False
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"")
        self.request_id = given.decode() if _REQUEST_ID.fullmatch(given) else new_request_id()
        self.body_bytes: int | None = None
        self.route: str | None = None
        """Route in metrics, if it is not the path."""
        self.timeline: Timeline | None = None
        self.times_ms: Sequence[tuple[str, float]] = ()
        """Milliseconds in each stage, once the answer's headers have them."""
        self.model: str | None = None
        """Name of the model, once it is known."""
        self.operation: str | None = None
        """Name of the task's operation in traces, once it is known."""
        self.trace: RequestTrace | None = None
        """None: the request is not traced."""

    @property
    def trace_id(self) -> str | None:
        """Trace id of the request: that of its `traceparent`, or of its own span; None without both."""
        if self.trace is not None:
            return written(self.trace.trace_id)
        given = trace_parent(self.headers.get(b"traceparent", b""))
        return None if given is None else written(given.trace_id)

    def enters(self, model: str, operation: str | None = None) -> Timeline:
        """Note the model and the operation of the request; return its timeline, which its trace follows."""
        self.model, self.operation = model, operation
        self.timeline = Timeline(trace=self.trace)
        if self.trace is not None:
            self.trace.model = model
        return self.timeline

    @property
    def own_request_id(self) -> str | None:
        """Id that the client gave in `X-Request-Id`; None if it gave none, or one that is not accepted."""
        given = self.headers.get(b"x-request-id", b"")
        return self.request_id if given.decode("latin-1") == self.request_id else None

    async def receive(self) -> Message:
        """Receive a message of the body, as ASGI's `receive` does."""
        message = await self._receive()
        if message["type"] == "http.request":
            self.body_bytes = (self.body_bytes or 0) + len(message.get("body", b""))
        return message

    async def json_body(self, *, any_type: bool = False) -> bytes | bytearray:
        """Return the body, after a check that its type is JSON.

        Args:
            any_type: Accept any type, as Ollama does: curl sends JSON with the type of a form by default.

        Raises:
            HttpError: The Content-Type is not JSON.
        """
        if not any_type and self._media_type() != JSON:
            raise HttpError(status.UNSUPPORTED_MEDIA, _JSON_ONLY)
        return await self._body()

    async def form_or_json_body(self) -> tuple[bytes | bytearray, bytes | None]:
        """Return the body and the boundary of a form; the boundary is None for JSON.

        Raises:
            HttpError: The Content-Type is neither JSON nor a form.
            InvalidInput: The body is a form without a boundary.
        """
        kind = self._media_type()
        if kind not in (JSON, FORM):
            raise HttpError(status.UNSUPPORTED_MEDIA, f"{_JSON_ONLY}, or 'multipart/form-data'")
        boundary = boundary_of(self.headers[b"content-type"]) if kind == FORM else None
        return await self._body(), boundary

    def _media_type(self) -> bytes:
        """Return the media type of the body: JSON if it has none, since several clients rely on that.

        A type with the suffix `+json` counts as JSON, too (RFC 6839, section 3.1).
        """
        kind = self.headers.get(b"content-type", JSON).split(b";", 1)[0].strip().lower()
        return JSON if not kind or (kind.startswith(b"application/") and kind.endswith(b"+json")) else kind

    async def _body(self) -> bytes | bytearray:
        body: bytes | bytearray = (await self._receive()).get("body", b"")  # both paths send it as one message
        self.body_bytes = len(body)
        return body[len(BOM_UTF8) :] if body.startswith(BOM_UTF8) else body  # RFC 8259, section 8.1

    async def next_piece(self) -> bytes | None:
        """Return the next piece of the body of an upload; None at its end.

        Raises:
            Abandoned: The client left before the end.
            HttpError: The body exceeds a limit.
        """
        if self._body_ended:
            return None
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise Abandoned("The client left before its body was complete")
        self._body_ended = not message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        self.body_bytes = (self.body_bytes or 0) + len(piece)
        return piece

    @property
    def object_id(self) -> str:
        """The file, the batch or the operator's model that the path names; empty if it names none."""
        found: str = self.scope.get(OBJECT, "")
        return found

    @property
    def owner(self) -> str:
        """Owner of what the request stores, by its key or the tenant header; empty without either."""
        owner: str = self.scope.get(OWNER, "")
        return owner

    @property
    def wants_lines(self) -> bool:
        """True if the client asks for an answer line by line."""
        return NDJSON in self.headers.get(b"accept", b"")

    @property
    def named_model(self) -> str | None:
        """Name of the model in the path; None if it has none."""
        name: str | None = self.scope.get(MODEL)
        return name

    @property
    def engine(self) -> Engine | None:
        """The engine that the front door has chosen: ready, able, and the only possible one."""
        engine: Engine | None = self.scope.get(ENGINE)
        return engine

    @property
    def tenant(self) -> str | None:
        """Tenant of the request, by its key or the tenant header; None if unknown."""
        tenant: str | None = self.scope.get(TENANT)
        return tenant

    def priority(self) -> Priority:
        """Return the priority of the request, see `priority_of`.

        Raises:
            InvalidInput: `X-Priority` is not one of the two priorities.
        """
        if (priority := priority_of(self.headers)) is None:
            raise InvalidInput(f"X-Priority: expected {' or '.join(Priority)}", param="X-Priority")
        return priority

    def timeout_s(self) -> float:
        """Return the client's timeout in seconds: `X-Request-Timeout`, or `Prefer: wait=`.

        Raises:
            InvalidInput: The header is not a number of seconds in range.
        """
        field, text = "X-Request-Timeout", self.headers.get(b"x-request-timeout")
        if text is None:
            wait = _PREFERRED_WAIT.search(self.headers.get(b"prefer", b""))
            if wait is None:
                return math.inf
            field, text = "Prefer: wait", wait[1]
        try:
            timeout_s = float(text)
        except ValueError:
            timeout_s = math.nan
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            message = f"{field}: expected a number of seconds above 0 and up to {MAX_TIMEOUT_S:.0f}"
            raise InvalidInput(message, param=field)
        return timeout_s


def new_request_id() -> str:
    """Return a random id, for a request without one."""
    return f"{getrandbits(128):032x}"


def priority_of(headers: Mapping[bytes, bytes]) -> Priority | None:
    """Return the priority in `X-Priority`; None if it is not a priority.

    Without that header, the urgency in `Priority` counts (RFC 9218, section 4.1): 7 stands for background work. An
    invalid `Priority` header is ignored, as the RFC demands.
    """
    if (given := headers.get(b"x-priority")) is not None:
        return _PRIORITIES.get(given.lower())
    if b"priority" in headers and _BACKGROUND.search(headers[b"priority"]):
        return Priority.BULK
    return Priority.INTERACTIVE


Handler: TypeAlias = Callable[[Call], Awaitable[Answer]]
