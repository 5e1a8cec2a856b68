"""Third-party clients on real sockets: their answers equal those of the engine in process.

The servers run in threads of their own, one for each event loop, so that a client can bring its own loop or none.
"""

from __future__ import annotations

import gc
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest
from anyio.from_thread import start_blocking_portal

# Before they are imported: none of them is to call home, or to fetch anything.
os.environ |= {
    "ANONYMIZED_TELEMETRY": "False",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_OFFLINE": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}

from staged_pool.runtime.engine.engine import Engine
from tests.conftest import BACKENDS
from tests.servers.on_socket import Served, serving
from tests.servers.tiny_models import tiny_models

EXTRA: Final = (
    *("chromadb", "cohere", "haystack", "infinity_client", "langchain_cohere", "langchain_nvidia_ai_endpoints"),
    *("langchain_ollama", "langchain_openai", "llama_index", "mixedbread", "ollama", "openai", "voyageai"),
)
"""Packages of `make clients`; LiteLLM has an environment of its own."""

KEY: Final = "a-key-of-the-tests-0123456789abcdef"
TEXTS: Final = ["A man is eating food.", "naïve café, Ωmega 🙂", "short", "Someone has a meal."]
QUERY: Final = "Who eats?"
LOOPS: Final = [
    backend if backend.id == "uvloop" else pytest.param(*backend.values, id=backend.id, marks=pytest.mark.long)
    for backend in BACKENDS
]
"""The servers' event loops. Each change is tested on one, `make clients` on all: the tests of the dialects, which have
no clients, are on all for each change."""

WITHIN: Final = 1e-5
"""Tolerance of values that went through the decimal numbers of a dialect."""


class Oracle:
    """A server, and what its engines say when they are asked in process."""

    def __init__(self, server: Served, call: Callable[..., Any]) -> None:
        self.url = server.url
        self._server = server
        self._call = call

    def __call__(self, model: str, method: str, *args: Any, **options: Any) -> Any:
        engine: Engine = self._server.engines[model]

        async def ask() -> Any:
            return await getattr(engine, method)(*args, **options)

        return self._call(ask)


@pytest.fixture(scope="session", params=LOOPS)
def server(request: pytest.FixtureRequest) -> Iterator[Oracle]:
    backend, options = request.param
    with start_blocking_portal(backend, options) as portal:
        with portal.wrap_async_context_manager(serving(*tiny_models(), api_keys=(KEY,))) as served:
            yield Oracle(served, portal.call)


@pytest.fixture(scope="module", autouse=True)
def what_clients_leave_open() -> Iterator[None]:
    """Is closed here, and warned of in no other test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Allow warnings and open resources of clients."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture
def nothing_blocks_the_event_loop() -> None:
    """Allow clients to block their own loops."""


def client_package(name: str, *, of_the_extra: bool = True) -> Any:
    """Import a client. Without the extra the test is skipped; with it, a missing package is a failure."""
    top = name.partition(".")[0]
    if find_spec(top) is None and (not of_the_extra or not any(map(find_spec, EXTRA))):
        pytest.skip(f"{top} is not installed: make clients")
    return importlib.import_module(name)
