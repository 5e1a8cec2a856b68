"""ASGI application: passes each request to the handler of its route, sends the answer, logs and counts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from staged_pool.api import status
from staged_pool.api.addresses import MODEL, Addresses
from staged_pool.api.app.batch_service import Batches
from staged_pool.api.app.call import Answer, Call, Handler, Lines
from staged_pool.api.app.dialects import error_format_of
from staged_pool.api.app.engine_choice import no_route
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.app.finished_requests import FinishedRequests, milliseconds
from staged_pool.api.app.fleet import Fleet
from staged_pool.api.app.front_door import FrontDoor
from staged_pool.api.app.load_report import LOAD_HEADER, LOAD_HEADER_FORMAT
from staged_pool.api.app.metrics import ServerMetrics
from staged_pool.api.app.model_admin import ModelAdmin
from staged_pool.api.app.operation_routes import alive
from staged_pool.api.app.pages import HTML, PAGES
from staged_pool.api.app.plugin_routes import Forwarding, PluginRoutes
from staged_pool.api.app.routes import Routes
from staged_pool.api.app.sending_files import send_file
from staged_pool.api.asgi import App, Headers, Message, Receive, Scope, Send
from staged_pool.api.config import ServerConfig
from staged_pool.api.cors import CORS_METHODS, is_preflight
from staged_pool.api.keys import Keys
from staged_pool.api.limits.http_statistics import HttpStatistics
from staged_pool.api.limits.request_limits import RequestLimits, party_of
from staged_pool.api.limits.server_state import ServerState
from staged_pool.api.status import Problem
from staged_pool.api.tracing.tracer import Tracer
from staged_pool.api.wire.chunked_json import size_of
from staged_pool.api.wire.dialects.tei_tokens import tei_error, timing_headers
from staged_pool.runtime.memory.answers import AnswerMemory
from staged_pool.stages.errors import StagedPoolError, shortened
from staged_pool.stages.exhausted import exhausted, is_out_of_memory
from staged_pool.stages.log import get_logger
from staged_pool.stages.user_code import user_code

log = get_logger("staged_pool.api")


class Application:
    """ASGI application of one server.

    Cancellation of a call cancels its request in the engine, and is logged as status 499.

    Args:
        registry: The engines.
        server_state: State of the HTTP server, for limits and metrics.
        config: Keys, logging, and truncation on the routes of text-embeddings-inference.
        pipelines: Names of the pipelines; the registry has them once their models are loaded.
        batches: Files and batches. None: the server has no routes for them.
        fleet: Reports on all processes. None: there is only this one.
        admin: Loads and unloads models. None: the server has no routes for that.
        tracer: Traces requests. None: traces are off.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        server_state: ServerState | None = None,
        config: ServerConfig | None = None,
        pipelines: Sequence[str] = (),
        *,
        batches: Batches | None = None,
        fleet: Fleet | None = None,
        admin: ModelAdmin | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._registry = registry
        self._config = config or ServerConfig()
        self._server_state = server_state = server_state or ServerState()
        self._metrics = ServerMetrics(registry, server_state, registry.totals)
        self._plugins = PluginRoutes(registry)
        resources = Routes(
            registry,
            self._metrics,
            self._plugins,
            self._config,
            pipelines,
            batches=batches,
            fleet=fleet,
            admin=admin,
        ).table()
        self._resources: dict[str, App] = {path: _Resource(self, handlers) for path, handlers in resources.items()}
        self._finished = FinishedRequests(self._metrics.http, self._config, self._resources.keys(), tracer)
        self._addresses = Addresses(
            resources, lambda: [engine.card.name for engine in registry.engines], self._config.root_path
        )
        self.front_door = FrontDoor(
            registry,
            RequestLimits(self._config, server_state),
            Keys(self._config.api_keys, self._config.tenant_header, self._config.admin_api_keys),
            self._addresses,
            frozenset((method, path) for path in resources for method, of in resources[path].items() if of is alive),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._addresses.place(scope)
        if scope[MODEL] is not None and not self._registry.knows(scope[MODEL]):
            await self.respond(self._no_such_model, scope, receive, send)
        elif (found := self._plugins.app_for(scope["path"])) is not None:
            headers = partial(self._further_headers, scope)
            await self.respond(Forwarding(*found, send, headers), scope, receive, send)
        else:
            await self._resources.get(scope["path"], self._not_found)(scope, receive, send)

    def http_statistics(self) -> HttpStatistics:
        """Return a snapshot of connections and requests."""
        return self._metrics.http.snapshot()

    @property
    def closes_connections(self) -> bool:
        """True while each answer closes its connection: the server drains or is about to, or memory is short."""
        return self._registry.closes_connections or not self._server_state.keeps_alive

    def answer_now(self, decision: Problem | Answer, scope: Scope, body_bytes: int) -> tuple[Answer, Headers]:
        """Make, log and count the answer for a decision of the front door; return it with its headers."""
        call = self._call(scope, _no_body)
        self._finished.begins(call)
        call.body_bytes = body_bytes
        answer = decision if isinstance(decision, Answer) else _rejection(decision, scope)
        headers = self._headers(call, answer, 0.0)
        self._finished.ends(call, answer, 0.0)
        return answer, headers

    def answering_with(self, decision: Problem | Answer) -> App:
        """Return an application that answers each request with one decision, and logs and counts it."""

        async def handler(call: Call) -> Answer:
            return decision if isinstance(decision, Answer) else _rejection(decision, call.scope)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await self.respond(handler, scope, receive, send)

        return answer

    def _call(self, scope: Scope, receive: Receive) -> Call:
        """Return the call of a request, with the memory of its answer: one account for all routes."""
        memory = AnswerMemory(self._server_state.memory.budget.answers, party_of(scope), is_written=True)
        return Call(scope, receive, error_format_of(scope["path"]), memory)

    async def respond(self, handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request with the result of `handler`, then log and count it."""
        started = time.perf_counter()
        send = self._metrics.http.timed(send)
        call = self._call(scope, receive)
        self._finished.begins(call)
        outcome = Answer(status=499, word="abandoned")  # until the answer is sent
        with call.answer as memory:
            try:
                call.lines = Lines(send, partial(self._further_headers, scope, call.request_id))
                answer = await _answer(handler, call)
                if answer.sent_bytes is not None:
                    outcome = answer
                    return
                if call.lines.begun:
                    await call.lines.end(b"".join(answer.pieces))
                    outcome = replace(answer, status=200)  # the status that was sent; `word` names a later error
                    return
                memory.encoded(size_of(answer.body))
                headers = self._headers(call, answer, time.perf_counter() - started)
                if answer.file is not None:
                    await send_file(answer, headers, scope, send)
                    outcome = answer
                    return
                await send({"type": "http.response.start", "status": answer.status, "headers": headers})
                *others, last = answer.pieces
                for piece in others:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": last})
                outcome = answer
            finally:
                if call.lines is not None and call.lines.is_endless and call.lines.begun:
                    outcome = Answer()  # its client decides when it ends
                self._finished.ends(call, outcome, time.perf_counter() - started)

    def _further_headers(self, scope: Scope, request_id: str) -> Headers:
        headers = [(b"x-request-id", request_id.encode()), *self._closing(scope)]
        return headers + self._load_header(dict(scope["headers"]))

    def _closing(self, scope: Scope) -> Headers:
        if self.closes_connections and scope["http_version"].startswith("1"):
            return [(b"connection", b"close")]
        return []

    def _headers(self, call: Call, answer: Answer, seconds: float) -> Headers:
        headers = [*_content_headers(answer), (b"x-request-id", call.request_id.encode())]
        if call.timeline is not None and call.timeline.items:  # otherwise no stage has worked on it
            call.times_ms = milliseconds(call.timeline)
            times = ", ".join([f"{name};dur={ms:g}" for name, ms in call.times_ms])
            headers.append((b"server-timing", times.encode()))
            if call.error_format is tei_error:
                headers += timing_headers(call.timeline, seconds)
        return headers + self._load_header(call.headers) + self._closing(call.scope)

    def _load_header(self, asked: Mapping[bytes, bytes]) -> Headers:
        """Return the header with the load, if the request or the settings want it."""
        wanted = asked.get(LOAD_HEADER_FORMAT, b"JSON" if self._config.load_header else None)
        value = None if wanted is None else self._registry.load().header(wanted)
        return [] if value is None else [(LOAD_HEADER, value)]

    async def _not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.respond(self._no_such_route, scope, receive, send)

    async def _no_such_model(self, call: Call) -> Answer:
        raise self._registry.unknown(call.named_model or "")

    async def _no_such_route(self, call: Call) -> Answer:
        method, path = call.scope["method"], call.scope["path"]
        if (method, path) == ("OPTIONS", "*"):
            return Answer(status=204, headers=[(b"allow", ", ".join(CORS_METHODS).encode())])
        return Answer.of(no_route(method, path, list(self._resources)), call.error_format)


_NO_PREFLIGHT: Final = "Pages of other origins need --cors-origin to use this server; other clients may use:"


class _Resource:
    """One path with its handlers by method."""

    def __init__(self, application: Application, handlers: Mapping[str, Handler]) -> None:
        self._application = application
        self._handlers = dict(handlers)
        if "GET" in handlers:
            self._handlers["HEAD"] = handlers["GET"]  # the protocol omits the body
        self._allow = ", ".join(sorted(self._handlers))
        self._handlers.setdefault("OPTIONS", self._options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["method"], self._wrong_method)
        await self._application.respond(handler, scope, receive, send)

    async def _options(self, call: Call) -> Answer:
        if is_preflight(call.scope):  # CORS is off; otherwise its middleware answers preflights
            return self._not_allowed(call, f"{_NO_PREFLIGHT} {self._allow}")
        return Answer(status=204, headers=[(b"allow", self._allow.encode())])

    async def _wrong_method(self, call: Call) -> Answer:
        path, method = call.scope["path"], shortened(call.scope["method"])
        return self._not_allowed(call, f"{path} does not support {method}; it supports: {self._allow}")

    def _not_allowed(self, call: Call, message: str) -> Answer:
        answer = Answer.of(Problem(kind=status.WRONG_METHOD, message=message), call.error_format)
        return replace(answer, headers=[*answer.headers, (b"allow", self._allow.encode())])


def _content_headers(answer: Answer) -> Headers:
    if answer.status == 204:  # no content, and no Content-Length either (RFC 9110, section 8.6)
        return [*answer.headers]
    return [(b"content-type", answer.content_type), (b"content-length", b"%d" % answer.size), *answer.headers]


async def _no_body() -> Message:
    raise RuntimeError("an immediate answer does not read the body")


def _rejection(problem: Problem, scope: Scope) -> Answer:
    """Return the answer to a rejected request: the problem, or a page for a browser without a key."""
    path = scope["path"]
    answer, page = Answer.of(problem, error_format_of(path)), PAGES.get(path)
    is_browser = scope["method"] in ("GET", "HEAD")
    if problem.kind is status.UNAUTHORIZED and page is not None and is_browser:  # the page asks its user for the key
        return replace(answer, body=page.body, content_type=HTML, headers=[*answer.headers, *page.headers])
    return answer


async def _answer(handler: Handler, call: Call) -> Answer:
    """Return the answer of `handler`, or the one for its error. A cancellation by the connection or the host passes."""
    try:
        async with user_code(is_own_task=False):  # parsers in Rust may panic, too
            return await handler(call)
    except Exception as error:
        if not isinstance(error, StagedPoolError) and is_out_of_memory(error):
            return Answer.of(status.problem(exhausted(error, "http")), call.error_format)
        problem = status.problem(error, call.words)
        if problem.kind is status.UNEXPECTED:
            log.exception("request.crashed", path=call.scope["path"], request_id=call.request_id)
        return Answer.of(problem, call.error_format)
