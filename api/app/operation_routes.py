"""Routes of operation: health, models, statistics, metrics, caches, and the description of the API."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import anyio.to_thread
import msgspec

from staged_pool.api.addresses import ONE_MODEL
from staged_pool.api.app.call import Answer, Call, Handler
from staged_pool.api.app.engine_registry import RETRY_AFTER_S, EngineRegistry
from staged_pool.api.app.fleet import Fleet
from staged_pool.api.app.metrics import CONTENT_TYPE as METRICS_TYPE
from staged_pool.api.app.metrics import OPENMETRICS_TYPE, ServerMetrics, wants_openmetrics
from staged_pool.api.app.tasks import TASKS
from staged_pool.api.config import ServerConfig
from staged_pool.api.openapi.admin import ADMIN_OPERATIONS
from staged_pool.api.openapi.batches import BATCH_OPERATIONS
from staged_pool.api.openapi.document import document
from staged_pool.api.openapi.operations import OPERATIONS
from staged_pool.api.openapi.pipelines import PIPELINES, path_of, pipeline_operations
from staged_pool.api.wire.chunked_json import dump
from staged_pool.api.wire.dialects import infinity, openai, tei_tokens
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.version import VERSION
from staged_pool.stages.offload import ThreadOffload

_VERSION: Final = dump({"version": VERSION})


class OperationRoutes:
    """Handlers of routes about the server and its models.

    Args:
        registry: The engines.
        metrics: Metrics of the server.
        config: Settings of the server, for descriptions of it.
        readers: Makes the description of the API in its thread.
        fleet: Reports on all processes. None: there is only this one.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        metrics: ServerMetrics,
        config: ServerConfig,
        readers: ThreadOffload,
        fleet: Fleet | None = None,
    ) -> None:
        self._fleet = fleet
        self._registry = registry
        self._metrics = metrics
        self._config = config
        self._readers = readers
        self._described: tuple[list[str], str] = ([], "")
        self._description = b""
        """The JSON of `/openapi.json`, for the paths and the mount in `_described`."""
        self._started = int(time.time())

    def table(self) -> Mapping[str, Mapping[str, Handler]]:
        """Return the handlers by path and method."""
        return {
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
        }

    async def _info(self, call: Call) -> Answer:
        engine = self._registry.enter(call.named_model)
        return Answer(tei_tokens.encode_info(engine.card, engine.config, auto_truncate=self._config.auto_truncate))

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
        if reason := self._registry.unready(call.named_model):
            retry = [(b"retry-after", str(int(RETRY_AFTER_S)).encode())]
            answer: dict[str, object] = {"ready": False, "reason": reason}
            if status := self._registry.load_status:
                answer["loading"] = {"model": status.model, "phase": status.phase, "percent": status.percent}
            return Answer(msgspec.json.encode(answer), 503, headers=retry)
        return Answer(
            msgspec.json.encode(
                {"ready": True, "models": [engine.card for engine in self._registry.listed(call.named_model)]}
            )
        )

    async def _load(self, call: Call) -> Answer:
        return Answer(msgspec.json.encode(self._registry.load().report()))

    async def _metrics_text(self, call: Call) -> Answer:
        openmetrics = wants_openmetrics(call.headers.get(b"accept", b""))
        if self._fleet is None:
            text = self._metrics.text(openmetrics=openmetrics)
        else:
            text = await self._fleet.report("openmetrics" if openmetrics else "metrics")
        return Answer(text, content_type=OPENMETRICS_TYPE if openmetrics else METRICS_TYPE)

    async def _stages(self, call: Call) -> Answer:
        self._loaded(call)
        if self._fleet is not None:
            return Answer(await self._fleet.report("stages"))
        return Answer(
            msgspec.json.encode(
                {
                    "models": self._registry.statistics(),
                    "pipelines": self._registry.pipeline_statistics(),
                    "http": self._metrics.http.snapshot(),
                }
            )
        )

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
        """Return the engine that the path names, or all engines, even those without service.

        Raises:
            EngineStopped: No engine is loaded yet.
        """
        if not (engines := self._registry.engines):
            self._registry.enter()  # raises with the reason
        return [engine for engine in engines if call.named_model in (None, engine.card.name)]

    async def _openapi(self, call: Call) -> Answer:
        self._registry.enter()  # the routes depend on the models
        cards = [engine.card for engine in self._registry.engines]
        paths = [path for path in OPERATIONS if path not in TASKS or any(map(TASKS[path].able, cards))]
        paths += [PIPELINES, *map(path_of, self._registry.pipelines)] if self._registry.pipelines else []
        paths += BATCH_OPERATIONS if self._config.batch_dir is not None else ()
        paths += ADMIN_OPERATIONS if self._config.admin_api_keys else ()
        described = paths, call.scope.get("root_path", "")
        if self._described != described:
            made = partial(document, paths, self._config, described[1], pipeline_operations(self._registry.pipelines))
            self._description = await anyio.to_thread.run_sync(made, limiter=self._readers.limiter)
            self._described = described
        return Answer(self._description)


async def alive(call: Call) -> Answer:
    """Answer a liveness probe."""
    return answer_alive()


def answer_alive() -> Answer:
    """Return the answer to a liveness probe: seconds since 1970, which Infinity's client reads."""
    return Answer(b'{"unix":%.3f}' % time.time())


async def _version(call: Call) -> Answer:
    return Answer(_VERSION)
