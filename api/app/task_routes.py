"""Routes of tasks: requests that go through the stages of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from staged_pool.api.app.body_reader import BodyReader
from staged_pool.api.app.call import Answer, Call, Handler
from staged_pool.api.app.dialects import error_format_of
from staged_pool.api.app.engine_choice import check_able, no_model, served
from staged_pool.api.app.engine_finder import EngineFinder
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.app.plugin_routes import PluginRoutes
from staged_pool.api.app.tasks import Task, tasks
from staged_pool.api.tracing.encoding_formats import encoding_formats
from staged_pool.api.wire.dialects import invocations, plugin
from staged_pool.api.wire.exchange import Body, Exchange, Received
from staged_pool.api.wire.ndjson import LineExchange
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.engine.engine import Engine
from staged_pool.stages.errors import Unsupported
from staged_pool.stages.work import Request


class TaskRoutes:
    """Handlers of the paths of tasks, and of two paths whose bodies select the task.

    Args:
        registry: The engines.
        bodies: Reads bodies.
        plugins: Answers requests with data for a plugin.
        auto_truncate: See `ServerConfig`.
    """

    def __init__(
        self, registry: EngineRegistry, bodies: BodyReader, plugins: PluginRoutes, *, auto_truncate: bool
    ) -> None:
        self._registry = registry
        self._bodies = bodies
        self._plugins = plugins
        self._finder = EngineFinder(registry, bodies)
        self._tasks = tasks(auto_truncate=auto_truncate)

    def table(self) -> Mapping[str, Mapping[str, Handler]]:
        """Return the handlers by path and method."""
        return {
            **{path: {"POST": partial(self._task, task)} for path, task in self._tasks.items()},
            "/invocations": {"POST": self._invocations},
            "/": {"POST": self._root},
        }

    async def _task(self, task: Task, call: Call) -> Answer:
        if call.engine is None:
            self._registry.enter(call.named_model)  # reject before the body is read
            engines = self._registry.engines
            if not any(task.has_path(engine.card) for engine in engines):
                raise no_model(task, engines)
        if task.forms:
            body, boundary = await call.form_or_json_body()
            await self._bodies.check_bounds(body, boundary)
        else:
            body, boundary = await self._bodies.json(call, any_type=task.any_type), None
        if task.immediate is not None and (immediate := task.immediate(body)) is not None:
            await self._engine_for(task, call, body, boundary)
            call.timeout_s()  # these two raise for invalid headers
            call.priority()
            return Answer(immediate)
        return await self._answer(task, call, body, boundary)

    async def _answer(self, task: Task, call: Call, body: Body, boundary: bytes | None = None) -> Answer:
        if task.takes_data and boundary is None and plugin.may_have_data(body):
            choice = await self._bodies.peek(plugin.choice_of, body)
            if choice is not None:
                return await self._plugins.answer(call, choice, body)
        theirs = None if task.error_format_of is None else await self._bodies.peek(task.error_format_of, body)
        if theirs is not None:
            call.error_format = theirs
        task = await self._finder.task_of(task, body, boundary)
        engine = await self._engine_for(task, call, body, boundary)
        call.enters(engine.card.name, task.operation)
        if call.trace is not None and boundary is None and (formats := encoding_formats(body)):
            call.trace.attributes["gen_ai.request.encoding_formats"] = formats
        if task.read_lines is not None and call.wants_lines and theirs is None:
            return await self._stream(task, engine, call, body, boundary)
        placed = call.named_model is not None
        exchange = Exchange(
            task.read, body, engine.card, call.request_id, self._registry.limits, boundary=boundary, placed=placed
        )
        with _errors_in_words_of(exchange, call):
            written = await engine.submit(
                exchange.decode,
                exchange.encode,
                body_bytes=len(body),
                timeout_s=call.timeout_s(),
                priority=call.priority(),
                tenant=call.tenant,
                timeline=call.timeline,
                images=task.shown_images(engine.card, body, call.headers.get(b"content-type", b"")),
                answer=call.answer,
            )
        _note_dimensions(call, task, exchange, engine.card)
        return Answer(written.content, content_type=written.content_type, headers=list(written.headers))

    async def _stream(self, task: Task, engine: Engine, call: Call, body: Body, boundary: bytes | None) -> Answer:
        """Send the results line by line, and return the last line, with the usage."""
        if call.lines is None or task.read_lines is None:
            raise RuntimeError("only a request with a handler can be streamed")
        placed = call.named_model is not None
        exchange = LineExchange(
            task.read_lines, body, engine.card, call.request_id, self._registry.limits, boundary=boundary, placed=placed
        )
        lines = call.lines

        def decode() -> Request:
            request = exchange.decode()
            lines.further = [*lines.further, *exchange.headers]
            return request

        with _errors_in_words_of(exchange, call):
            tokens = await engine.stream(
                decode,
                exchange.encode,
                call.lines.give,
                body_bytes=len(body),
                timeout_s=call.timeout_s(),
                priority=call.priority(),
                tenant=call.tenant,
                timeline=call.timeline,
                images=task.shown_images(engine.card, body, call.headers.get(b"content-type", b"")),
                answer=call.answer,
            )
        _note_dimensions(call, task, exchange, engine.card)
        return Answer(exchange.last(tokens))

    async def _engine_for(self, task: Task, call: Call, body: Body, boundary: bytes | None) -> Engine:
        if call.engine in self._registry.engines and call.engine is not None:  # it may have left meanwhile
            return call.engine
        return await self._finder.find(task, body, boundary, call.named_model)

    async def _invocations(self, call: Call) -> Answer:
        self._registry.enter(call.named_model)
        body = await self._bodies.json(call)
        paths = await self._bodies.peek(invocations.candidates, body)
        engines = self._registry.engines
        name = call.named_model or (await self._bodies.model_of(body, None) if len(engines) > 1 else None)
        asked = [self._registry.enter(name)] if name else engines
        for path in paths:
            task = await self._finder.task_of(self._tasks[path], body)
            if any(task.able(engine.card) for engine in asked):
                call.error_format = error_format_of(path)
                return await self._answer(replace(task, read=task.read_invocation or task.read), call, body)
        if name:
            check_able(self._tasks[paths[0]], asked[0], engines)
        message = f"The model does not support {self._tasks[paths[0]].name} API"
        raise Unsupported(f"{message}; served: {served(engines)}")

    async def _root(self, call: Call) -> Answer:
        """Answer a request to text-embeddings-inference's root: the body and the model determine the task."""
        engines = self._registry.listed(call.named_model)
        body = await self._bodies.json(call)
        cards = [engine.card for engine in engines]
        path = await self._bodies.peek(partial(invocations.root_path, cards=cards), body)
        task = self._tasks[path]
        if not any(map(task.able, cards)):
            message = f"The model does not support {task.name} API"
            raise Unsupported(f"{message}; served: {served(self._registry.engines)}")
        return await self._answer(task, call, body)


def _note_dimensions(call: Call, task: Task, exchange: Received[Any], card: ModelCard) -> None:
    """Note the numbers of each vector of an answer, if the request is traced."""
    if call.trace is not None and task.gives_vectors and (dimensions := exchange.dimensions or card.width):
        call.trace.attributes["gen_ai.embeddings.dimension.count"] = dimensions


@contextmanager
def _errors_in_words_of(exchange: Received[Any], call: Call) -> Iterator[None]:
    """Report errors of the block with the field names of the request's dialect."""
    try:
        yield
    finally:
        call.words = exchange.words
