"""The routes: from an HTTP request to a call of the engine and back, with one log line for each."""

from __future__ import annotations

import math
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec
import structlog
from starlette.routing import Route, Router

from staged_pool.api import status
from staged_pool.api.asgi import App, Headers, Receive, Scope, Send
from staged_pool.api.lobby import RETRY_AFTER_S, Lobby
from staged_pool.api.metrics import CONTENT_TYPE as METRICS_TYPE
from staged_pool.api.metrics import ServerMetrics
from staged_pool.api.status import HttpRefusal, Problem
from staged_pool.api.traffic import Traffic
from staged_pool.api.wire import openai
from staged_pool.stages.errors import InvalidInput, UnknownModel
from staged_pool.stages.ticket import Timeline

JSON: Final = b"application/json"
REFUSALS_LOGGED_EVERY_S: Final = 1.0
"""A refusal for overload must be cheap: one in this time has a log line, which says how many had none."""

PROBES: Final = frozenset({"/health", "/ready", "/metrics", "/stages"})
"""Asked every few seconds by machines; their log lines are of the debug level."""

STAGE_TIMES: Final = ("parse", "preprocess", "queue", "device", "postprocess")
MAX_TIMEOUT_S: Final = 86_400.0
"""A day: more is a mistake in the unit."""

_PREFERRED_WAIT: Final = re.compile(rb"(?:^|[,;]) *wait *= *\"?([^\",; ]*)", re.IGNORECASE)  # RFC 7240, section 4.3
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")

log = structlog.get_logger("staged_pool.api")


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer, complete."""

    body: bytes = b""
    status: int = 200
    content_type: bytes = JSON
    headers: Headers = field(default_factory=list)
    word: str | None = None
    """What the log calls the problem, where this answers one."""

    @staticmethod
    def of(problem: Problem) -> Answer:
        return Answer(problem.body(), problem.status, headers=problem.headers(), word=problem.row.word)


class Call:
    """One request, as its handler sees it."""

    __slots__ = ("_receive", "body_bytes", "headers", "request_id", "scope", "timeline")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope = scope
        self._receive = receive
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"")
        self.request_id = given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.body_bytes: int | None = None
        self.timeline: Timeline | None = None

    async def json_body(self) -> bytes | bytearray:
        """The body, which says that it is JSON. The guard has made one message of it.

        Raises:
            HttpRefusal: It says that it is something else.
        """
        media_type = self.headers.get(b"content-type", b"").split(b";", 1)[0].strip().lower()
        if media_type != JSON:
            message = "Unsupported Media Type: Only 'application/json' is allowed"
            raise HttpRefusal(status.UNSUPPORTED_MEDIA, message)
        body: bytes | bytearray = (await self._receive()).get("body", b"")
        self.body_bytes = len(body)
        return body

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


Handler: TypeAlias = Callable[[Call], Awaitable[Answer]]


class Application:
    """The ASGI application of one server.

    Cancellation of a call cancels its request in the engine, and is logged as status 499.

    Args:
        lobby: Leads to the engine.
        traffic: What the HTTP side holds, for the metrics.
    """

    def __init__(self, lobby: Lobby, traffic: Traffic | None = None) -> None:
        self._lobby = lobby
        self._metrics = ServerMetrics(lobby.statistics, traffic or Traffic())
        self._started = int(time.time())
        self._refusals = _Sample(every_s=REFUSALS_LOGGED_EVERY_S)
        resources: dict[str, Mapping[str, Handler]] = {
            "/v1/embeddings": {"POST": self._embeddings},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": self._tokenize},
            "/health": {"GET": _health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._metrics_text},
            "/stages": {"GET": self._stages},
        }
        routes = [Route(path, _Resource(self, handlers)) for path, handlers in resources.items()]
        self._paths = frozenset(resources)
        self._router = Router(routes, default=self._not_found, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if b"%" in scope.get("raw_path", b""):  # no route has one, and a proxy may have let it pass as another path
            await self._not_found(scope, receive, send)
        else:
            await self._router(scope, receive, send)

    def turn_away(self, scope: Scope, body_bytes: int) -> Problem | None:
        """Whether the engine would refuse this request for overload; asked before anything is done for it.

        Everything else that can be wrong with it is found on the usual way, which asks admission again.
        """
        engine = self._lobby.engine
        if engine is None or scope["path"] != "/v1/embeddings" or self._lobby.not_ready:
            return None
        error = engine.overload(body_bytes)
        return None if error is None else status.problem(error)

    def refuse(self, problem: Problem) -> App:
        """An application that answers any request with `problem`, and logs and counts it as every other."""

        async def handler(call: Call) -> Answer:
            return Answer.of(problem)

        async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
            await self.respond(handler, scope, receive, send)

        return refusing

    async def respond(self, handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request with what `handler` makes of it; then log and count it."""
        started = time.perf_counter()
        call = Call(scope, receive)
        outcome = Answer(status=499, word="abandoned")  # unless the answer gets out
        try:
            answer = await _answer(handler, call)
            headers = self._headers(call, answer)
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            await send({"type": "http.response.body", "body": answer.body})
            outcome = answer
        finally:
            self._finish(call, outcome, time.perf_counter() - started)

    def _headers(self, call: Call, answer: Answer) -> Headers:
        headers = [
            (b"content-type", answer.content_type),
            (b"content-length", str(len(answer.body)).encode()),
            (b"x-request-id", call.request_id.encode()),
            *answer.headers,
        ]
        if call.timeline is not None:
            headers.append((b"server-timing", _server_timing(call.timeline)))
        if self._lobby.leaving and call.scope["http_version"].startswith("1"):
            headers.append((b"connection", b"close"))
        return headers

    def _finish(self, call: Call, outcome: Answer, seconds: float) -> None:
        path = call.scope["path"]
        route = path if path in self._paths else "other"
        self._metrics.observe(route, outcome.status, seconds)
        left_out = 0
        if outcome.status == 429 and (left_out := self._refusals.count()) < 0:
            return
        fields: dict[str, object] = {"method": call.scope["method"], "path": path, "status": outcome.status}
        if outcome.word is not None:
            fields["error"] = outcome.word
        if call.body_bytes is not None:
            fields["body_bytes"] = call.body_bytes
        if call.timeline is not None:
            fields |= {"items": call.timeline.items, "tokens": call.timeline.tokens}
            fields |= {f"{name}_ms": ms for name, ms in _milliseconds(call.timeline)}
        if left_out:
            fields["refusals_left_out"] = left_out
        fields |= {"total_ms": round(seconds * 1e3, 3), "request_id": call.request_id}
        (log.debug if path in PROBES else log.info)("request.finished", **fields)

    async def _embeddings(self, call: Call) -> Answer:
        engine = self._lobby.enter()
        body = await call.json_body()
        exchange = openai.EmbeddingsCall(body, call.request_id)
        call.timeline = Timeline()
        answer = await engine.submit(
            exchange.decode,
            exchange.encode,
            body_bytes=len(body),
            timeout_s=call.timeout_s(),
            timeline=call.timeline,
        )
        return Answer(answer)

    async def _tokenize(self, call: Call) -> Answer:
        engine = self._lobby.enter()
        wanted = openai.decode_tokenize(await call.json_body())
        if wanted.model and wanted.model != engine.card.name:
            raise UnknownModel(f"The model `{wanted.model}` does not exist.", param="model")
        tokens = await engine.tokenize(wanted.prompt, add_special_tokens=wanted.add_special_tokens)
        return Answer(
            openai.encode_tokens(tokens, max_tokens=engine.card.max_tokens, with_strings=wanted.return_token_strs)
        )

    async def _models(self, call: Call) -> Answer:
        return Answer(openai.encode_models(self._lobby.enter().card, created=self._started))

    async def _ready(self, call: Call) -> Answer:
        engine, reason = self._lobby.engine, self._lobby.not_ready
        if engine is None or reason:
            retry = [(b"retry-after", str(int(RETRY_AFTER_S)).encode())]
            return Answer(msgspec.json.encode({"ready": False, "reason": reason}), 503, headers=retry)
        return Answer(msgspec.json.encode({"ready": True, "model": engine.card}))

    async def _metrics_text(self, call: Call) -> Answer:
        return Answer(self._metrics.text(), content_type=METRICS_TYPE)

    async def _stages(self, call: Call) -> Answer:
        if (statistics := self._lobby.statistics()) is None:
            self._lobby.enter()  # raises, and says why there is nothing to show
        return Answer(msgspec.json.encode(statistics))

    async def _not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.respond(_no_such_route, scope, receive, send)


class _Sample:
    """Lets one event in a while through, and counts the others."""

    def __init__(self, *, every_s: float) -> None:
        self._every_s = every_s
        self._next_at = 0.0
        self._left_out = 0

    def count(self) -> int:
        """Of an event that is let through, how many were left out since the last; -1 for one that is left out."""
        if time.monotonic() < self._next_at:
            self._left_out += 1
            return -1
        self._next_at = time.monotonic() + self._every_s
        left_out, self._left_out = self._left_out, 0
        return left_out


class _Resource:
    """What one path answers to, by method."""

    def __init__(self, application: Application, handlers: Mapping[str, Handler]) -> None:
        self._application = application
        self._handlers = dict(handlers)
        if "GET" in handlers:
            self._handlers["HEAD"] = handlers["GET"]  # the server leaves the body out
        self._allow = ", ".join(sorted(self._handlers)).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["method"], self._wrong_method)
        await self._application.respond(handler, scope, receive, send)

    async def _wrong_method(self, call: Call) -> Answer:
        return Answer(b'{"detail":"Method Not Allowed"}', 405, headers=[(b"allow", self._allow)], word="method")


async def _no_such_route(call: Call) -> Answer:
    return Answer(b'{"detail":"Not Found"}', 404, word="route")


async def _health(call: Call) -> Answer:
    return Answer()


async def _answer(handler: Handler, call: Call) -> Answer:
    """What `handler` returns, or what its error is answered with. Cancellation passes."""
    try:
        return await handler(call)
    except Exception as error:
        problem = status.problem(error)
        if problem.row is status.UNEXPECTED:
            log.exception("request.crashed", path=call.scope["path"], request_id=call.request_id)
        return Answer.of(problem)


def _milliseconds(timeline: Timeline) -> list[tuple[str, float]]:
    return [(name, round(getattr(timeline, f"{name}_s") * 1e3, 3)) for name in STAGE_TIMES]


def _server_timing(timeline: Timeline) -> bytes:
    return ", ".join(f"{name};dur={ms:g}" for name, ms in _milliseconds(timeline)).encode()
