"""Other servers, which run ASGI applications in the event loop of the test."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import anyio
import hypercorn.asyncio
import hypercorn.trio
import pytest
import sniffio
import uvicorn
from hypercorn.config import Config

from staged_pool.api.http.listener import bind
from tests.conftest import BACKENDS
from tests.support.waiting import until

HOSTS = pytest.mark.parametrize(
    ("anyio_backend", "kind"),
    [
        pytest.param(*backend.values, kind, id=f"{kind}-{backend.id}")
        for backend in BACKENDS
        for kind in ("uvicorn", "hypercorn")
        if (kind, backend.id) != ("uvicorn", "trio")
    ],
    indirect=["anyio_backend"],
)
"""Runs a test with each host on each event loop that it has, as `kind`."""

LOG: Final = logging.getLogger("uvicorn.error")
"""Log of each host."""


@asynccontextmanager
async def hosting(kind: str, app: Any) -> AsyncIterator[int]:
    """Run `app` on a free port, which the block gets. At its end the host shuts down in order.

    Args:
        kind: "uvicorn", on asyncio or uvloop; or "hypercorn", on trio too.
        app: The root application of the host.
    """
    listener = bind("127.0.0.1", 0)
    port: int = listener.getsockname()[1]
    run = _uvicorn if kind == "uvicorn" else _hypercorn
    stop, started = anyio.Event(), anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, app, listener, stop, started)
        try:
            with anyio.fail_after(120):
                await started.wait()
            yield port
        finally:
            stop.set()


@contextmanager
def log_of_hosts() -> Iterator[list[str]]:
    """Collect the warnings and errors of hosts, with their tracebacks."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(logging.Formatter().format(record))

    collector = Collector(logging.WARNING)
    LOG.addHandler(collector)
    try:
        yield found
    finally:
        LOG.removeHandler(collector)


async def _uvicorn(app: Any, listener: socket.socket, stop: anyio.Event, started: anyio.Event) -> None:
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))

    async def ends() -> None:
        await stop.wait()
        server.should_exit = True

    async def begins() -> None:
        await until(lambda: server.started, within_s=120)
        started.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(begins)
        tasks.start_soon(ends)
        try:
            await server.serve([listener])
        except SystemExit as error:  # the lifespan failed
            raise RuntimeError("uvicorn did not start; its log says why") from error
        finally:
            listener.close()
        tasks.cancel_scope.cancel()


async def _hypercorn(app: Any, listener: socket.socket, stop: anyio.Event, started: anyio.Event) -> None:
    serve: Callable[..., Awaitable[None]]
    serve = hypercorn.trio.serve if sniffio.current_async_library() == "trio" else hypercorn.asyncio.serve
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.errorlog = LOG
    config.graceful_timeout = 5

    async def stopped() -> None:  # Hypercorn waits for it once its lifespan has begun
        started.set()
        await stop.wait()

    await serve(app, config, shutdown_trigger=stopped)
