from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio.from_thread
import httpx
import pytest

from staged_pool.api.config import ServerConfig
from staged_pool.api.http.listener import bind
from staged_pool.api.http.server import Server
from staged_pool.runtime.config import EngineConfig
from tests.models.conftest import TinyFolder, tiny_folder
from tests.models.encoded_images import encode
from tests.support.waiting import until

__all__ = ["Serve", "tiny_folder"]


class Serve(Protocol):
    """Return a client of a real server of tiny models, each named by its folder."""

    def __call__(self, *kinds: str | Path, auto_truncate: bool = True, **settings: Any) -> httpx.Client: ...


@pytest.fixture(scope="session")
def serve(tiny_folder: TinyFolder) -> Iterator[Serve]:
    with contextlib.ExitStack() as stack:
        portal = stack.enter_context(anyio.from_thread.start_blocking_portal())
        clients: dict[object, httpx.Client] = {}

        def start(*kinds: str | Path, auto_truncate: bool = True, **settings: Any) -> httpx.Client:
            key = (kinds, auto_truncate, *settings.items())
            if key not in clients:
                folders = [tiny_folder(kind) if isinstance(kind, str) else kind for kind in kinds]
                every: dict[str, Any] = {"torch_threads": 1, "dtype": "float32", **settings}
                models = [EngineConfig(model=str(folder), **every) for folder in folders]
                running = _running(ServerConfig(auto_truncate=auto_truncate), models)
                port = stack.enter_context(portal.wrap_async_context_manager(running))
                client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
                clients[key] = stack.enter_context(client)
            return clients[key]

        yield start


@pytest.fixture(scope="session")
def image_url() -> str:
    """A data URL of a JPEG."""
    return "data:image/jpeg;base64," + base64.b64encode(encode(48, 32)).decode()


@asynccontextmanager
async def _running(config: ServerConfig, models: list[EngineConfig]) -> Any:
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = Server(config, models)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run, listener)
        await until(lambda: not server.registry.not_ready, within_s=120)  # models are loaded
        yield port
        await server.close()
