from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import anyio.from_thread
import httpx
import pytest

from tests.models.conftest import TinyFolder, tiny_folder
from tests.models.encoded_images import encode
from tests.servers.on_socket import serving
from tests.servers.tiny_models import tiny

__all__ = ["ClientOf", "tiny_folder"]


class ClientOf(Protocol):
    """Return a client of a real server of tiny models, each named by its folder."""

    def __call__(self, *kinds: str | Path, auto_truncate: bool = True, **settings: Any) -> httpx.Client: ...


@pytest.fixture(scope="session")
def client_of(tiny_folder: TinyFolder) -> Iterator[ClientOf]:
    with contextlib.ExitStack() as stack:
        portal = stack.enter_context(anyio.from_thread.start_blocking_portal())
        clients: dict[object, httpx.Client] = {}

        def start(*kinds: str | Path, auto_truncate: bool = True, **settings: Any) -> httpx.Client:
            key = (kinds, auto_truncate, *settings.items())
            if key not in clients:
                folders = [tiny_folder(kind) if isinstance(kind, str) else kind for kind in kinds]
                models = [tiny(folder, **settings) for folder in folders]
                running = serving(*models, auto_truncate=auto_truncate)
                served = stack.enter_context(portal.wrap_async_context_manager(running))
                clients[key] = stack.enter_context(httpx.Client(base_url=served.url, timeout=60))
            return clients[key]

        yield start


@pytest.fixture(scope="session")
def image_url() -> str:
    """A data URL of a JPEG."""
    return "data:image/jpeg;base64," + base64.b64encode(encode(48, 32)).decode()
