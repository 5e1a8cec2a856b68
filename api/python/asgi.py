"""The server as an ASGI application, to mount in FastAPI, Starlette or any other host.

    from fastapi import FastAPI
    from staged_pool import EngineConfig, asgi

    pool = asgi.app(EngineConfig(model="..."))
    host = FastAPI(lifespan=pool.lifespan)
    host.mount("/pool", pool)

Run it with uvicorn or Hypercorn, on asyncio or trio. `pool.engine` is the engine, for the program's own use.
"""

from __future__ import annotations

from staged_pool.api.config import ServerConfig
from staged_pool.api.http.mounted import MountedServer
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine

__all__ = ["MountedServer", "ServerConfig", "app"]


def app(*models: EngineConfig | Engine, server: ServerConfig | None = None) -> MountedServer:
    """Make the routes of `staged-pool serve` for models, as an ASGI application.

    Args:
        models: Models to load when its lifespan begins, and engines that are open already.
        server: Settings of HTTP, such as `api_keys`, without those of connections.

    Raises:
        ConfigError: A setting of connections is given; the server that runs the application has these.
    """
    return MountedServer(*models, server=server)
