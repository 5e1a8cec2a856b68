"""Table of all routes: each path with its handlers by method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from staged_pool.api.app.admin_routes import AdminRoutes
from staged_pool.api.app.batch_routes import BatchRoutes
from staged_pool.api.app.batch_service import Batches
from staged_pool.api.app.body_reader import BodyReader
from staged_pool.api.app.call import LIVE, Answer, Call, Handler
from staged_pool.api.app.dialects import Listings
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.app.fleet import Fleet
from staged_pool.api.app.live_routes import LiveRoutes
from staged_pool.api.app.metrics import ServerMetrics
from staged_pool.api.app.model_admin import ModelAdmin
from staged_pool.api.app.operation_routes import OperationRoutes
from staged_pool.api.app.pages import HTML, PAGES
from staged_pool.api.app.pipeline_routes import PipelineRoutes
from staged_pool.api.app.plugin_routes import PluginRoutes
from staged_pool.api.app.task_routes import TaskRoutes
from staged_pool.api.app.token_routes import TokenRoutes
from staged_pool.api.config import ServerConfig
from staged_pool.api.keys import OPEN
from staged_pool.stages.offload import ThreadOffload

PROBE_PATHS: Final = OPEN | {"/load", "/metrics", "/stages", LIVE}
"""Paths that monitoring polls every few seconds: their requests are logged at debug level."""


class Routes:
    """Routes of one server.

    Args:
        registry: The engines.
        metrics: Metrics of the server.
        plugins: Answers requests with data for a plugin.
        config: Settings of the server, for its description, and for truncation on the routes of
            text-embeddings-inference.
        pipelines: Names of the pipelines.
        batches: Files and batches. None: the server has no routes for them.
        fleet: Reports on all processes. None: there is only this one.
        admin: Loads and unloads models. None: the server has no routes for that.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        metrics: ServerMetrics,
        plugins: PluginRoutes,
        config: ServerConfig | None = None,
        pipelines: Sequence[str] = (),
        *,
        batches: Batches | None = None,
        fleet: Fleet | None = None,
        admin: ModelAdmin | None = None,
    ) -> None:
        config = config or ServerConfig()
        readers = ThreadOffload(1)
        bodies = BodyReader(registry, readers)
        self._tasks = TaskRoutes(registry, bodies, plugins, auto_truncate=config.auto_truncate)
        self._tokens = TokenRoutes(registry, bodies)
        self._operation = OperationRoutes(registry, metrics, config, readers, fleet)
        self._live = LiveRoutes(registry, metrics.http, metrics.server_state, fleet)
        self._listings = Listings(registry)
        self._pipelines = PipelineRoutes(registry, bodies, pipelines)
        self._batches = None if batches is None else BatchRoutes(registry, bodies, batches)
        self._admin = None if admin is None else AdminRoutes(admin, bodies)

    def table(self) -> Mapping[str, Mapping[str, Handler]]:
        """Return the handlers by path and method."""
        table: dict[str, Mapping[str, Handler]] = {}
        for part in (self._tasks, self._tokens, self._operation, self._live, self._listings, self._pipelines):
            table |= part.table()
        if self._batches is not None:
            table |= self._batches.table()
        if self._admin is not None:
            table |= self._admin.table()
        for path in PAGES:
            table[path] = {"GET": partial(_page, path), **table.get(path, {})}
        return table


async def _page(path: str, call: Call) -> Answer:
    return Answer(PAGES[path].body, content_type=HTML, headers=PAGES[path].headers)
