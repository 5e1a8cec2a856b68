"""One HTTP request as a handler sees it, and one answer."""

from __future__ import annotations

import math
import re
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import getrandbits
from typing import Final, TypeAlias

from staged_pool.api import status
from staged_pool.api.addresses import MODEL
from staged_pool.api.asgi import Headers, Receive, Scope, Send
from staged_pool.api.config import MAX_TIMEOUT_S
from staged_pool.api.keys import TENANT
from staged_pool.api.status import HttpError, Problem
from staged_pool.api.wire.chunked_json import Pieces
from staged_pool.api.wire.exchange import JSON
from staged_pool.api.wire.forms import boundary_of
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.memory.answers import AnswerMemory
from staged_pool.stages.errors import ENGINE_WORDS, InvalidInput, Words
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.timeline import Timeline

FORM: Final = b"multipart/form-data"
_JSON_ONLY: Final = "Unsupported Media Type: Only 'application/json' is allowed"

ENGINE: Final = "staged_pool.engine"
"""Key of a scope: the engine that can do its task and takes requests, where the front door knows that it is meant."""

PATH_TAKEN: Final = "staged_pool.path_taken"
"""Key of a scope: the path that a request has taken through the server; without it, it is the general one."""

Describe: TypeAlias = Callable[[Problem], tuple[int, bytes]]
"""In which words a dialect says what is wrong: the status and the body of the answer."""

_PREFERRED_WAIT: Final = re.compile(rb"(?:^|[,;]) *wait *= *\"?([^\",; ]*)", re.IGNORECASE)  # RFC 7240, section 4.3
_PRIORITIES: Final = {priority.encode(): priority for priority in Priority}
_BACKGROUND: Final = re.compile(rb"(?:^|,)[ \t]*u=7[ \t]*(?:$|[,;])")
LINES: Final = b"application/x-ndjson"
_TRACE_PARENT: Final = re.compile(rb"(?!ff)[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer, complete."""

    body: Pieces = b""
    status: int = 200
    content_type: bytes = JSON
    headers: Headers = field(default_factory=list)
    word: str | None = None
    """What the log calls the problem, where this answers one."""

    @property
    def pieces(self) -> tuple[bytes, ...]:
        """The body, as it is sent."""
        return (self.body,) if isinstance(self.body, bytes) else self.body

    @staticmethod
    def of(problem: Problem, describe: Describe) -> Answer:
        status, body = describe(problem)
        return Answer(body, status, headers=problem.headers(), word=problem.row.word)


class Lines:
    """An answer whose lines are sent as they come. Its head is sent with the first of them.

    Args:
        send: Of the request.
        headers: Of the answer, but for its length, which nobody knows.
    """

    def __init__(self, send: Send, headers: Callable[[], Headers]) -> None:
        self._send = send
        self._headers = headers
        self.begun = False
        self.sent_bytes = 0

    async def give(self, lines: bytes) -> None:
        """Send some lines, each with its end. Waits for a client who is slow to read."""
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers()})
        self.sent_bytes += len(lines)
        await self._send({"type": "http.response.body", "body": lines, "more_body": True})

    async def end(self, last: bytes) -> None:
        """Send the last line."""
        self.sent_bytes += len(last) + 1
        await self._send({"type": "http.response.body", "body": last + b"\n"})


class Call:
    """One request, as its handler sees it."""

    __slots__ = (
        "_receive",
        "answer",
        "body_bytes",
        "describe",
        "headers",
        "lines",
        "model",
        "request_id",
        "scope",
        "timeline",
        "times_ms",
        "words",
    )

    def __init__(self, scope: Scope, receive: Receive, describe: Describe) -> None:
        self.scope = scope
        self.answer: AnswerMemory | None = None
        """Account of the memory of its answer. None: nothing is computed for it."""
        self.lines: Lines | None = None
        """For an answer that does not wait for its end; None where nothing can be sent yet."""
        self.describe = describe
        self.words: Words = ENGINE_WORDS
        """The client's names for the fields of its request, as far as it is read."""
        """How its client is told of a problem."""
        self._receive = receive
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"")
        self.request_id = given.decode() if _REQUEST_ID.fullmatch(given) else new_request_id()
        self.body_bytes: int | None = None
        self.timeline: Timeline | None = None
        self.times_ms: Sequence[tuple[str, float]] = ()
        """Of the timeline by stage, once the answer tells them."""
        self.model: str | None = None
        """The model that was asked, once that is known."""

    @property
    def trace_id(self) -> str | None:
        """Of the trace that the request belongs to, where its `traceparent` is one (W3C Trace Context, section 3.2)."""
        given = _TRACE_PARENT.fullmatch(self.headers.get(b"traceparent", b""))
        return given["trace"].decode() if given and given["trace"].strip(b"0") else None

    async def json_body(self, *, any_type: bool = False) -> bytes | bytearray:
        """The body, which is JSON as far as its type says. The guard has made one message of it.

        Args:
            any_type: Take it for JSON whatever its type, as Ollama does: curl's own type is that of a form.

        Raises:
            HttpError: It says that it is something else.
        """
        if not any_type and self._media_type() != JSON:
            raise HttpError(status.UNSUPPORTED_MEDIA, _JSON_ONLY)
        return await self._body()

    async def form_or_json_body(self) -> tuple[bytes | bytearray, bytes | None]:
        """The body, which says that it is JSON or a form; and the boundary of a form.

        Raises:
            HttpError: It says that it is something else.
            InvalidInput: It is a form without a boundary.
        """
        kind = self._media_type()
        if kind not in (JSON, FORM):
            raise HttpError(status.UNSUPPORTED_MEDIA, f"{_JSON_ONLY}, or 'multipart/form-data'")
        boundary = boundary_of(self.headers[b"content-type"]) if kind == FORM else None
        return await self._body(), boundary

    def _media_type(self) -> bytes:
        """The type of the body; a body that names none is taken for JSON, as by what several clients were made for.

        So is one of a type that is written as JSON (RFC 6839, section 3.1).
        """
        kind = self.headers.get(b"content-type", JSON).split(b";", 1)[0].strip().lower()
        return JSON if not kind or (kind.startswith(b"application/") and kind.endswith(b"+json")) else kind

    async def _body(self) -> bytes | bytearray:
        body: bytes | bytearray = (await self._receive()).get("body", b"")
        self.body_bytes = len(body)
        return body[len(BOM_UTF8) :] if body.startswith(BOM_UTF8) else body  # RFC 8259, section 8.1

    @property
    def wants_lines(self) -> bool:
        """Whether the client asks for an answer line by line."""
        return LINES in self.headers.get(b"accept", b"")

    @property
    def named_model(self) -> str | None:
        """The model that the path names; None where it names none."""
        name: str | None = self.scope.get(MODEL)
        return name

    @property
    def engine(self) -> Engine | None:
        """The engine that the front door has found ready and able, and the only one that may be meant."""
        engine: Engine | None = self.scope.get(ENGINE)
        return engine

    @property
    def tenant(self) -> str | None:
        """Whose request it is, as far as anything says so."""
        tenant: str | None = self.scope.get(TENANT)
        return tenant

    def priority(self) -> Priority:
        """How it stands to other requests.

        Raises:
            InvalidInput: `X-Priority` is none of the two priorities.
        """
        if (priority := priority_of(self.headers)) is None:
            raise InvalidInput(f"X-Priority: expected {' or '.join(Priority)}", param="X-Priority")
        return priority

    def timeout_s(self) -> float:
        """How long the client waits for the answer, in seconds: `X-Request-Timeout`, or `Prefer: wait=`.

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
    """For a request that has none."""
    return f"{getrandbits(128):032x}"


def priority_of(headers: Mapping[bytes, bytes]) -> Priority | None:
    """What `X-Priority` says; None where that is no priority. Without it, the urgency of `Priority` counts (RFC 9218,
    section 4.1): 7 is what nobody waits for, and what cannot be read is to be ignored."""
    if (given := headers.get(b"x-priority")) is not None:
        return _PRIORITIES.get(given.lower())
    if b"priority" in headers and _BACKGROUND.search(headers[b"priority"]):
        return Priority.BULK
    return Priority.INTERACTIVE


Handler: TypeAlias = Callable[[Call], Awaitable[Answer]]
