"""The ASGI application of a server in memory: no socket, no connection, no limits of HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from staged_pool.api.app.app import Application
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.asgi import App, Receive, Scope, Send
from staged_pool.api.config import ServerConfig
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.media.image_completer import Fetch, reject_fetch
from staged_pool.runtime.memory.governor import UNLIMITED_BYTES, MemoryGovernor
from staged_pool.runtime.pipelines.file import PipelineFile, built_on
from staged_pool.stages.stage import StageOptions
from tests.servers.engines import Given, opening
from tests.support.model import LetterModel


class InMemory:
    """An application and its engines, and clients of it."""

    def __init__(self, config: ServerConfig | None = None, pipelines: Sequence[PipelineFile] = ()) -> None:
        self.registry = EngineRegistry()
        self.application = Application(self.registry, config=config, pipelines=[file.name for file in pipelines])

    @property
    def engine(self) -> Engine:
        """The only engine."""
        (engine,) = self.registry.engines
        return engine

    def client(self, app: App | None = None, **settings: Any) -> httpx.AsyncClient:
        """Make a client of the application, or of one that stands before it."""
        transport = httpx.ASGITransport(app or self.application)
        return httpx.AsyncClient(transport=transport, base_url="http://test", **settings)

    async def behind_front_door(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application behind its front door, which asks for keys."""
        problem = self.application.front_door.reject(scope)
        await (self.application if problem is None else self.application.answering_with(problem))(scope, receive, send)


@asynccontextmanager
async def serving_in_memory(
    *models: Given,
    engine: EngineConfig | None = None,
    options: StageOptions | None = None,
    fetch: Fetch = reject_fetch,
    pipelines: Sequence[PipelineFile] = (),
    **config: Any,
) -> AsyncIterator[InMemory]:
    """Run engines behind an application. The arguments are those of `serving`, and pipelines on the engines."""
    served = InMemory(ServerConfig(**config), pipelines)
    configs, open_engines = opening(models or (LetterModel(),), engine, options, fetch)
    async with open_engines(configs, MemoryGovernor(UNLIMITED_BYTES)) as engines:
        served.registry.open(*engines.values(), pipelines=built_on(engines, pipelines))
        yield served
