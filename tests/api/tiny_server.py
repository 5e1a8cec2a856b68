"""A server of real, tiny models on a real socket, and the engines behind it: the oracle of its clients."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio

from staged_pool.api.config import ServerConfig
from staged_pool.api.http.listener import bind, url
from staged_pool.api.http.server import Server
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from tests.models.tiny import build
from tests.support.waiting import until

KINDS: Final[Mapping[str, str]] = {
    "embedder": "bge-m3",
    "ranker": "ce-bert-1label",
    "classifier": "seqcls-multiclass",
    "tagger": "tokcls-ner",
    "prompted": "e5-xlmr",
}
"""By the names under which they are served. The first answers where a request names none and it can do the task."""


@dataclass(frozen=True, slots=True)
class TinyServer:
    """One that is up."""

    url: str
    engines: Mapping[str, Engine]


@functools.cache
def folder(name: str) -> Path:
    """Return the folder of a model of `KINDS`; built once for the process."""
    root = tempfile.TemporaryDirectory(prefix="staged-pool-")
    _ROOTS.append(root)
    return build(KINDS[name], Path(root.name) / name)


_ROOTS: list[tempfile.TemporaryDirectory[str]] = []


@asynccontextmanager
async def tiny_server(*names: str, **config: Any) -> AsyncIterator[TinyServer]:
    """Serves the models `names`, or all of them."""
    models = [
        EngineConfig(model=str(folder(name)), served_name=name, dtype="float32", torch_threads=1)
        for name in names or KINDS
    ]
    listener = bind("127.0.0.1", 0)
    address = url(listener)
    server = Server(ServerConfig(**config), models)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run, listener)
        try:
            await until(lambda: not server.registry.not_ready, within_s=120)  # models are loaded
            engines = {engine.card.name: engine for engine in server.registry.engines}
            yield TinyServer(address, engines)
        finally:
            with anyio.CancelScope(shield=True):
                await server.close()
