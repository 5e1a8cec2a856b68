"""A program that mounts the server, and opens an engine for it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import assert_type

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount

import staged_pool
from staged_pool import asgi

pool = asgi.app(
    staged_pool.EngineConfig(model="folder"), server=asgi.ServerConfig(api_keys=("key",), body_limit_bytes=2**20)
)
host = FastAPI(lifespan=pool.lifespan)
host.mount("/pool", pool)
other = Starlette(routes=[Mount("/pool", pool)], lifespan=pool.lifespan)
empty = asgi.app()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
    async with staged_pool.open_engine() as engine, empty.running(engine) as engines:
        assert_type(engines, Mapping[str, staged_pool.Engine])
        yield


@host.get("/similar")
async def similar(a: str, b: str) -> float:
    assert_type(pool, asgi.MountedServer)
    assert_type(pool.engine, staged_pool.Engine)
    return float((await pool.engine.score(a, b)).scores[0])


asgi.app("folder")  # type: ignore[arg-type]
