"""The table of routes, and what each of them does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import anyio.to_thread
import msgspec

from staged_pool import __version__
from staged_pool.api.addresses import ONE_MODEL
from staged_pool.api.app.call import Answer, Call, Handler
from staged_pool.api.app.dialects import Listings, words_of
from staged_pool.api.app.engine_choice import check_able, no_model, pick, served
from staged_pool.api.app.engine_registry import RETRY_AFTER_S, EngineRegistry
from staged_pool.api.app.metrics import CONTENT_TYPE as METRICS_TYPE
from staged_pool.api.app.metrics import ServerMetrics
from staged_pool.api.app.pages import HTML, PAGES
from staged_pool.api.app.tasks import Task, tasks
from staged_pool.api.config import ServerConfig
from staged_pool.api.keys import OPEN
from staged_pool.api.openapi.document import document
from staged_pool.api.openapi.operations import OPERATIONS
from staged_pool.api.wire import extract_images, inputs
from staged_pool.api.wire.chunked_json import dump
from staged_pool.api.wire.dialects import infinity, invocations, openai, tei_tokens, tokens
from staged_pool.api.wire.exchange import Body, Exchange, Received
from staged_pool.api.wire.forms import read_form
from staged_pool.api.wire.json_bounds import Limits, check_bounds, is_small
from staged_pool.api.wire.ndjson import LineExchange
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.stages.errors import InvalidInput, TooLarge, Unsupported, Words
from staged_pool.stages.offload import ThreadOffload
from staged_pool.stages.timeline import Timeline

R = TypeVar("R")

PROBES: Final = OPEN | {"/load", "/metrics", "/stages"}
"""Asked every few seconds by machines; their log lines are of the debug level."""

INLINE_BYTES: Final = 32_768
"""Of the routes that are no tasks: bodies up to this size are read on the event loop, as parse does it."""

_VERSION: Final = dump({"version": __version__})


TASKS: Final = tasks(auto_truncate=True)
"""Every one of them is a POST that goes through the four stages."""


class Routes:
    """The handlers of one server.

    Args:
        registry: Leads to the engine.
        metrics: The server's numbers.
        config: What the routes' description says of the server, and how the routes of text-embeddings-inference cut.
    """

    def __init__(self, registry: EngineRegistry, metrics: ServerMetrics, config: ServerConfig | None = None) -> None:
        self._registry = registry
        self._config = config or ServerConfig()
        self._description: tuple[list[str], bytes] = ([], b"")
        self._metrics = metrics
        self._tasks = tasks(auto_truncate=self._config.auto_truncate)
        self._started = int(time.time())
        self._readers = ThreadOffload(1)

    def table(self) -> Mapping[str, Mapping[str, Handler]]:
        """What answers each path, by method."""
        pages: dict[str, Mapping[str, Handler]] = {path: {"GET": partial(_page, path)} for path in PAGES}
        return {
            **{path: {"POST": partial(self._task, task)} for path, task in self._tasks.items()},
            **Listings(self._registry).table(),
            "/invocations": {"POST": self._invocations},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/decode": {"POST": self._decode},
            "/info": {"GET": self._info},
            "/v1/models": {"GET": self._models},
            ONE_MODEL: {"GET": self._one_model},
            "/models": {"GET": self._models_with_load},
            "/version": {"GET": _version},
            "/health": {"GET": alive},
            "/ping": {"GET": alive, "POST": alive},
            "/ready": {"GET": self._ready},
            "/load": {"GET": self._load},
            "/metrics": {"GET": self._metrics_text},
            "/stages": {"GET": self._stages},
            "/flush_cache": {"POST": self._flush_cache},
            "/reset_mm_cache": {"POST": self._reset_mm_cache},
            "/openapi.json": {"GET": self._openapi},
            **pages,
            "/": {**pages["/"], "POST": self._root},
        }

    async def _task(self, task: Task, call: Call) -> Answer:
        if call.engine is None:
            self._registry.enter(call.named_model)  # before anything else is done
            engines = self._registry.engines
            if not any(task.able(engine.card) for engine in engines):
                raise no_model(task, engines)
        if task.forms:
            body, boundary = await call.form_or_json_body()
            await self._check_bounds(body, boundary)
        else:
            body, boundary = await self._json_body(call, any_type=task.any_type), None
        if task.at_once is not None and (at_once := task.at_once(body)) is not None:
            await self._engine_for(task, call, body, boundary)
            call.timeout_s()  # these two raise what is wrong with the headers, whatever is asked
            call.priority()
            return Answer(at_once)
        return await self._ask(task, call, body, boundary)

    async def _ask(self, task: Task, call: Call, body: Body, boundary: bytes | None = None) -> Answer:
        theirs = None if task.mark is None else await self._peek(task.mark, body)
        if theirs is not None:
            call.describe = theirs
        engine = await self._engine_for(task, call, body, boundary)
        call.model = engine.card.name
        call.timeline = Timeline()
        if task.read_lines is not None and call.wants_lines and theirs is None:
            return await self._stream(task, engine, call, body, boundary)
        placed = call.named_model is not None
        exchange = Exchange(
            task.read, body, engine.card, call.request_id, self._limits(), boundary=boundary, placed=placed
        )
        with _in_words_of(exchange, call):
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
        return Answer(written.content, content_type=written.content_type, headers=list(written.headers))

    async def _stream(self, task: Task, engine: Engine, call: Call, body: Body, boundary: bytes | None) -> Answer:
        """The results line by line, and as the answer what is known at the end."""
        if call.lines is None or task.read_lines is None:
            raise RuntimeError("lines are for requests that are answered by their handler")
        placed = call.named_model is not None
        exchange = LineExchange(
            task.read_lines, body, engine.card, call.request_id, self._limits(), boundary=boundary, placed=placed
        )
        with _in_words_of(exchange, call):
            tokens = await engine.stream(
                exchange.decode,
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
        return Answer(exchange.last(tokens))

    async def _engine_for(self, task: Task, call: Call, body: Body, boundary: bytes | None) -> Engine:
        """The engine of the model that the path or the body names; where neither does, of the one that is meant."""
        if call.engine is not None:
            return call.engine
        engines = self._registry.engines
        name: str | None = None
        if task.model_of is not None:
            name = await self._peek(partial(task.model_of, served=[engine.card.name for engine in engines]), body)
        elif len(engines) > 1:
            name = await self._model_of(body, boundary)
        if (placed := call.named_model) is not None:
            if name not in (None, "", placed) and any(name == engine.card.name for engine in engines):
                message = f"model: the path asks the model `{placed}`, and the body names `{name}`; drop one of them"
                raise InvalidInput(message, param="model")
            name = placed
        if name:
            engine = self._registry.enter(name)
            check_able(task, engine, engines)
            return engine
        several = len(engines) > 1 and boundary is None
        narrowed = await self._peek(task.narrow, body) if task.narrow and several else None
        return self._registry.enter(pick(task, engines, narrowed).card.name)

    async def _invocations(self, call: Call) -> Answer:
        self._registry.enter(call.named_model)
        body = await self._json_body(call)
        paths = await self._peek(invocations.candidates, body)
        engines = self._registry.engines
        name = call.named_model or (await self._model_of(body, None) if len(engines) > 1 else None)
        asked = [self._registry.enter(name)] if name else engines
        for path, task in ((path, self._tasks[path]) for path in paths):
            if any(task.able(engine.card) for engine in asked):
                call.describe = words_of(path)
                return await self._ask(task, call, body)
        if name:
            check_able(self._tasks[paths[0]], asked[0], engines)
        message = f"The model does not support {self._tasks[paths[0]].name} API"
        raise Unsupported(f"{message}; served: {served(engines)}")

    async def _root(self, call: Call) -> Answer:
        """A request of text-embeddings-inference to its root: what it is for follows from the body and the model."""
        engines = self._registry.listed(call.named_model)
        body = await self._json_body(call)
        cards = [engine.card for engine in engines]
        path = await self._peek(partial(invocations.root_path, cards=cards), body)
        task = self._tasks[path]
        if not any(map(task.able, cards)):
            message = f"The model does not support {task.name} API"
            raise Unsupported(f"{message}; served: {served(self._registry.engines)}")
        return await self._ask(task, call, body)

    async def _tokenize(self, call: Call) -> Answer:
        self._registry.enter(call.named_model)
        body = await self._json_body(call)
        if await self._peek(tei_tokens.is_tokenize, body):
            call.describe = tei_tokens.tei_error
            return await self._tokenize_texts(body, call)
        source, wanted = await self._read(partial(extract_images.read_json, tokens.decode_tokenize), body)
        engine = self._tokenizer(call, wanted.model)
        call.words = Words({"input": "prompt" if isinstance(source, str) else "messages"})
        found = await engine.tokenize(source, add_special_tokens=bool(wanted.add_special_tokens))
        return Answer(
            tokens.encode_tokens(found, max_tokens=engine.card.max_tokens, with_strings=bool(wanted.return_token_strs))
        )

    async def _tokenize_texts(self, body: Body, call: Call) -> Answer:
        engine = self._tokenizer(call)
        texts, wanted = await self._read(tei_tokens.decode_tokenize, body)
        _check_count(len(texts), engine, "inputs")
        prompt = tei_tokens.prompt_of(wanted.prompt_name, engine.card)
        texts = [prompt + text for text in texts]
        special = wanted.add_special_tokens is not False
        call.words = tei_tokens.words_of(wanted)
        found = []
        for index, text in enumerate(texts):
            with _of_input(index):
                found.append(await engine.tokenize(text, add_special_tokens=special))
        return Answer(tei_tokens.encode_tokens(texts, found))

    async def _detokenize(self, call: Call) -> Answer:
        self._registry.enter(call.named_model)
        wanted = await self._read(tokens.decode_detokenize, await self._json_body(call))
        engine = self._tokenizer(call, wanted.model)
        return Answer(tokens.encode_text(await engine.detokenize(wanted.tokens)))

    async def _decode(self, call: Call) -> Answer:
        engine = self._tokenizer(call)
        lists, skips, call.words = await self._read(tei_tokens.decode_ids, await self._json_body(call))
        _check_count(len(lists), engine, "ids")
        found = []
        for index, ids in enumerate(lists):
            with _of_input(index):
                found.append(await engine.detokenize(ids, skip_special_tokens=skips))
        return Answer(dump(found))

    async def _info(self, call: Call) -> Answer:
        engine = self._registry.enter(call.named_model)
        return Answer(tei_tokens.encode_info(engine.card, engine.config, auto_truncate=self._config.auto_truncate))

    def _tokenizer(self, call: Call, model: str | None = None) -> Engine:
        """The engine whose tokenizer is meant: ids of one model are nothing to another.

        Raises:
            InvalidInput: Neither the path nor the body names one of several.
        """
        name = call.named_model or model
        engines = self._registry.engines
        if not name and len(engines) > 1:
            self._registry.enter()  # says why, where requests are not taken
            names = ", ".join(engine.card.name for engine in engines)
            message = f"model: each model has its own tokens; name one in `model`, or put /m/NAME before: {names}"
            raise InvalidInput(message, param="model")
        return self._registry.enter(name)

    async def _model_of(self, body: Body, boundary: bytes | None) -> str | None:
        if boundary is None:
            return await self._peek(inputs.model_of, body)
        return await self._read(lambda form: inputs.model_of(read_form(form, boundary, self._limits()).json), body)

    async def _json_body(self, call: Call, *, any_type: bool = False) -> Body:
        """See `Call.json_body`; a body with more values than a request may have is rejected before it is read."""
        body = await call.json_body(any_type=any_type)
        await self._check_bounds(body, None)
        return body

    async def _check_bounds(self, body: Body, boundary: bytes | None) -> None:
        limits = self._limits()
        if boundary is None and not is_small(body, limits):  # the parts of a form are looked at one by one
            await self._readers(partial(check_bounds, limits=limits), body)

    def _limits(self) -> Limits:
        """Limits of the model that allows most: which one is meant is not known before a body is read."""
        configs = [engine.config for engine in self._registry.engines] or [EngineConfig()]
        return Limits(
            items=max(config.max_request_items for config in configs),
            tokens=max(config.max_tokens for config in configs),
        )

    async def _peek(self, reader: Callable[[Body], R], body: Body) -> R:
        """As `_read`, of what stands in short fields."""
        return await self._read(partial(extract_images.peek, reader), body)

    async def _read(self, decode: Callable[[Body], R], body: Body) -> R:
        """What a body says; read in a thread if it is large."""
        if len(body) <= INLINE_BYTES:
            return decode(body)
        return await self._readers(decode, body)

    async def _models(self, call: Call) -> Answer:
        cards = [engine.card for engine in self._registry.listed(call.named_model)]
        return Answer(openai.encode_models(cards, created=self._started))

    async def _one_model(self, call: Call) -> Answer:
        card = self._registry.enter(call.named_model).card
        return Answer(dump(openai.model_object(card, created=self._started)))

    async def _models_with_load(self, call: Call) -> Answer:
        models = [(engine.card, engine.statistics()) for engine in self._registry.listed(call.named_model)]
        return Answer(infinity.encode_models(models, created=self._started))

    async def _ready(self, call: Call) -> Answer:
        if reason := self._registry.obstruction(call.named_model):
            retry = [(b"retry-after", str(int(RETRY_AFTER_S)).encode())]
            return Answer(msgspec.json.encode({"ready": False, "reason": reason}), 503, headers=retry)
        return Answer(
            msgspec.json.encode(
                {"ready": True, "models": [engine.card for engine in self._registry.listed(call.named_model)]}
            )
        )

    async def _load(self, call: Call) -> Answer:
        inside = sum(statistics.admission.requests for statistics in self._registry.statistics().values())
        return Answer(dump({"server_load": inside}))

    async def _metrics_text(self, call: Call) -> Answer:
        return Answer(self._metrics.text(), content_type=METRICS_TYPE)

    async def _stages(self, call: Call) -> Answer:
        self._loaded(call)
        return Answer(msgspec.json.encode({"models": self._registry.statistics()}))

    async def _flush_cache(self, call: Call) -> Answer:
        for engine in self._loaded(call):
            engine.clear_image_cache()
            engine.clear_result_cache()
        return Answer()

    async def _reset_mm_cache(self, call: Call) -> Answer:
        for engine in self._loaded(call):
            engine.clear_image_cache()
        return Answer()

    def _loaded(self, call: Call) -> Sequence[Engine]:
        """The engine that the path names, or all, also those that take no requests.

        Raises:
            EngineStopped: There are none yet.
        """
        if not (engines := self._registry.engines):
            self._registry.enter()  # raises, and says why
        return [engine for engine in engines if call.named_model in (None, engine.card.name)]

    async def _openapi(self, call: Call) -> Answer:
        self._registry.enter()  # which routes there are depends on the models
        cards = [engine.card for engine in self._registry.engines]
        paths = [path for path in OPERATIONS if path not in TASKS or any(map(TASKS[path].able, cards))]
        if self._description[0] != paths:
            made = await anyio.to_thread.run_sync(document, paths, self._config, limiter=self._readers.limiter)
            self._description = paths, made
        return Answer(self._description[1])


@contextmanager
def _in_words_of(exchange: Received[Any], call: Call) -> Iterator[None]:
    """Have errors of the block told in the words of the request."""
    try:
        yield
    finally:
        call.words = exchange.words


@contextmanager
def _of_input(index: int) -> Iterator[None]:
    """Have an error of the block name the input that it is about."""
    try:
        yield
    except InvalidInput as error:
        error.index = index
        raise


async def _page(path: str, call: Call) -> Answer:
    return Answer(PAGES[path].body, content_type=HTML, headers=PAGES[path].headers)


def _check_count(count: int, engine: Engine, field: str) -> None:
    if count > (most := engine.config.max_request_items):
        raise TooLarge(f"{field}: there are {count}; a request may have {most}", param=field)


async def alive(call: Call) -> Answer:
    """Says that the server is alive: it answers."""
    return answer_alive()


def answer_alive() -> Answer:
    """The answer to whoever asks whether the server is alive: its clock, in seconds, which Infinity's client reads."""
    return Answer(b'{"unix":%.3f}' % time.time())


async def _version(call: Call) -> Answer:
    return Answer(_VERSION)
