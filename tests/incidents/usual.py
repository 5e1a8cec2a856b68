"""Servers in the usual designs, on which the probes of these tests fail.

Each is a Starlette application under uvicorn, with an event loop and a thread of its own.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from staged_pool.api.http.listener import bind


@contextmanager
def running(
    routes: Sequence[Route],
    *,
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]] | None = None,
    waits: bool = True,
    **settings: Any,
) -> Iterator[int]:
    """Run an application for a block, which gets the port.

    Args:
        routes: Routes of the application.
        lifespan: Runs around the application.
        waits: Begin the block when the application has started.
        settings: Settings of uvicorn.
    """
    with bind("127.0.0.1", 0) as free:
        port: int = free.getsockname()[1]
    app = Starlette(routes=routes, lifespan=lifespan)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, **settings))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while waits and not server.started:
            thread.join(0.002)
            assert thread.is_alive(), "it did not start"
        yield port
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)


def alive_in_a_thread(request: Request) -> Response:
    """Answer a probe, as a plain function: Starlette gives it a thread of anyio's default limiter."""
    return Response()


async def alive(request: Request) -> Response:
    """Answer a probe on the event loop, whatever the model does."""
    return Response()


def loading(load: Callable[[], object]) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    """Return a lifespan that loads a model before the server listens."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        load()
        yield

    return lifespan


class OneWorker:
    """A thread that takes requests from a queue, and ends with an exception.

    Args:
        forward: Computes the answer for a text.
    """

    def __init__(self, forward: Callable[[str], object]) -> None:
        self._forward = forward
        self._queue: queue.Queue[tuple[str, asyncio.AbstractEventLoop, asyncio.Future[object]]] = queue.Queue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while True:
                text, loop, answer = self._queue.get()
                value = self._forward(text)
                loop.call_soon_threadsafe(answer.set_result, value)
        except ValueError:
            return  # as after an exception that nobody caught, without its traceback in the tests' output

    async def embed(self, request: Request) -> Response:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[object] = loop.create_future()
        self._queue.put(((await request.json())["input"], loop, answer))
        return JSONResponse(await answer)
