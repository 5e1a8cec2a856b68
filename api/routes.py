"""The table of routes, and what each of them does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import anyio
import anyio.to_thread
import msgspec

from staged_pool import __version__
from staged_pool.api.call import Answer, Call, Handler
from staged_pool.api.lobby import RETRY_AFTER_S, Lobby
from staged_pool.api.metrics import CONTENT_TYPE as METRICS_TYPE
from staged_pool.api.metrics import ServerMetrics
from staged_pool.api.wire import classify, inputs, openai, pooling, score, tokens
from staged_pool.api.wire.exchange import Body, Exchange, Read, dump
from staged_pool.runtime.engine import Engine
from staged_pool.runtime.model import ModelCard
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import Unsupported
from staged_pool.stages.ticket import Timeline

R = TypeVar("R")

PROBES: Final = frozenset({"/health", "/ping", "/ready", "/load", "/metrics", "/stages"})
"""Asked every few seconds by machines; their log lines are of the debug level."""

INLINE_BYTES: Final = 32_768
"""Of the routes that are no tasks: bodies up to this size are read on the event loop, as parse does it."""

_VERSION: Final = dump({"version": __version__})


@dataclass(frozen=True, slots=True)
class Task:
    """What can be asked of the engine over HTTP."""

    name: str
    """What a refusal calls it, in the words of vLLM."""
    able: Callable[[ModelCard], bool]
    """Whether a model can do it."""
    read: Read


def _gives(output: Output) -> Callable[[ModelCard], bool]:
    return lambda card: output in card.outputs


def _scores(card: ModelCard) -> bool:
    return card.scoring is not None


_SCORE: Final = Task("Score", _scores, score.read_score)
_RERANK: Final = Task("Rerank (Score)", _scores, score.read_rerank)

TASKS: Final[Mapping[str, Task]] = {
    "/v1/embeddings": Task("Embeddings", _gives(Output.DENSE), openai.read_embeddings),
    "/pooling": Task("Pooling", lambda card: True, pooling.read_pooling),
    "/classify": Task("Classification", _gives(Output.LABELS), classify.read_classify),
    "/classify_tokens": Task("Token Classification", _gives(Output.TOKEN_LABELS), classify.read_classify_tokens),
    "/score": _SCORE,
    "/v1/score": _SCORE,
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
}
"""Every one of them is a POST that goes through the four stages."""


class Routes:
    """The handlers of one server.

    Args:
        lobby: Leads to the engine.
        metrics: The server's numbers.
    """

    def __init__(self, lobby: Lobby, metrics: ServerMetrics) -> None:
        self._lobby = lobby
        self._metrics = metrics
        self._started = int(time.time())
        self._readers = anyio.CapacityLimiter(1)

    def table(self) -> Mapping[str, Mapping[str, Handler]]:
        """What answers each path, by method."""
        return {
            **{path: {"POST": partial(self._task, task)} for path, task in TASKS.items()},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/v1/models": {"GET": self._models},
            "/version": {"GET": _version},
            "/health": {"GET": _health},
            "/ping": {"GET": _health, "POST": _health},
            "/ready": {"GET": self._ready},
            "/load": {"GET": self._load},
            "/metrics": {"GET": self._metrics_text},
            "/stages": {"GET": self._stages},
        }

    async def _task(self, task: Task, call: Call) -> Answer:
        self._lobby.enter()  # before anything else is done
        body = await call.json_body()
        engine = await self._engine_for(task, body)
        call.model = engine.card.name
        exchange = Exchange(task.read, body, engine.card, call.request_id)
        call.timeline = Timeline()
        answer = await engine.submit(
            exchange.decode,
            exchange.encode,
            body_bytes=len(body),
            timeout_s=call.timeout_s(),
            timeline=call.timeline,
        )
        return Answer(answer)

    async def _engine_for(self, task: Task, body: Body) -> Engine:
        """The engine of the model that a body names; where it names none, the first that can do the task."""
        engines = self._lobby.engines
        name = await self._read(inputs.model_of, body) if len(engines) > 1 else None
        if not name:
            name = next((engine.card.name for engine in engines if task.able(engine.card)), None)
        engine = self._lobby.enter(name)
        if not task.able(engine.card):
            raise Unsupported(f"The model does not support {task.name} API")
        return engine

    async def _tokenize(self, call: Call) -> Answer:
        self._lobby.enter()
        source, wanted = await self._read(tokens.decode_tokenize, await call.json_body())
        engine = self._lobby.enter(wanted.model)
        found = await engine.tokenize(source, add_special_tokens=bool(wanted.add_special_tokens))
        return Answer(
            tokens.encode_tokens(found, max_tokens=engine.card.max_tokens, with_strings=bool(wanted.return_token_strs))
        )

    async def _detokenize(self, call: Call) -> Answer:
        self._lobby.enter()
        wanted = await self._read(tokens.decode_detokenize, await call.json_body())
        engine = self._lobby.enter(wanted.model)
        return Answer(tokens.encode_text(await engine.detokenize(wanted.tokens)))

    async def _read(self, decode: Callable[[Body], R], body: Body) -> R:
        """What a body says; read in a thread if it is large."""
        if len(body) <= INLINE_BYTES:
            return decode(body)
        return await anyio.to_thread.run_sync(decode, body, limiter=self._readers)

    async def _models(self, call: Call) -> Answer:
        self._lobby.enter()
        cards = [engine.card for engine in self._lobby.engines]
        return Answer(openai.encode_models(cards, created=self._started))

    async def _ready(self, call: Call) -> Answer:
        if reason := self._lobby.not_ready:
            retry = [(b"retry-after", str(int(RETRY_AFTER_S)).encode())]
            return Answer(msgspec.json.encode({"ready": False, "reason": reason}), 503, headers=retry)
        return Answer(msgspec.json.encode({"ready": True, "models": [engine.card for engine in self._lobby.engines]}))

    async def _load(self, call: Call) -> Answer:
        inside = sum(statistics.admission.requests for statistics in self._lobby.statistics().values())
        return Answer(dump({"server_load": inside}))

    async def _metrics_text(self, call: Call) -> Answer:
        return Answer(self._metrics.text(), content_type=METRICS_TYPE)

    async def _stages(self, call: Call) -> Answer:
        if not (statistics := self._lobby.statistics()):
            self._lobby.enter()  # raises, and says why there is nothing to show
        return Answer(msgspec.json.encode({"models": statistics}))


async def _health(call: Call) -> Answer:
    return Answer()


async def _version(call: Call) -> Answer:
    return Answer(_VERSION)
