"""The client for asyncio and trio: carries bytes, and waits."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial, wraps
from itertools import chain, islice
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import anyio
import httpx

from staged_pool.client import calls
from staged_pool.client.batches import Stretch
from staged_pool.client.errors import located
from staged_pool.client.exchange import Answer, Ask, NoAnswer, Outcome, Pause, Request
from staged_pool.client.plans import Call, Options, Streamed
from staged_pool.client.progress import shown
from staged_pool.client.settings import Configured, failure, headers_of, lost
from staged_pool.client.streaming import Vector, VectorLines
from staged_pool.runtime.results import Usage
from staged_pool.stages.errors import StagedPoolError

A = ParamSpec("A")
P = TypeVar("P")
R = TypeVar("R")


def _asks(
    build: Callable[Concatenate[Options, A], Call[P, R]],
) -> Callable[Concatenate[AsyncClient, A], Coroutine[Any, Any, R]]:
    """The method that makes a call."""

    @wraps(build)
    async def method(self: AsyncClient, /, *args: A.args, **kwargs: A.kwargs) -> R:
        return await self._run(build(self._settings.options, *args, **kwargs))

    return method


def _streams(
    build: Callable[Concatenate[Options, A], Streamed],
) -> Callable[Concatenate[AsyncClient, A], AbstractAsyncContextManager[AsyncEmbeddingStream]]:
    """The method that makes a call whose answers are read in lines."""

    @asynccontextmanager
    @wraps(build)
    async def method(self: AsyncClient, /, *args: A.args, **kwargs: A.kwargs) -> AsyncIterator[AsyncEmbeddingStream]:
        call = build(self._settings.options, *args, **kwargs)
        stream = AsyncEmbeddingStream()
        deadline = self._settings.deadline(call.timeout_s, anyio.current_time())
        async with aclosing(self._vectors(call, deadline, stream)) as vectors:
            stream.vectors = vectors
            yield stream

    return method


class AsyncClient(Configured):
    """`Client` for a program that runs on asyncio or trio; see there for the arguments, and for what is raised.

    Belongs to one event loop, and any number of its tasks. Close it, or use it in an `async with` block. Cancelling a
    call ends its requests, and the server lets go of them.
    """

    _http: httpx.AsyncClient

    def _connect(self) -> None:
        path = self._settings.socket_path
        transport = None if path is None else httpx.AsyncHTTPTransport(uds=path, limits=self._settings.limits)
        self._http = httpx.AsyncClient(transport=transport, **self._settings.http())

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End all connections."""
        await self._http.aclose()

    embed = _asks(calls.embed)
    embed_stream = _streams(calls.embed_stream)
    classify = _asks(calls.classify)
    classify_tokens = _asks(calls.classify_tokens)
    score = _asks(calls.score)
    rerank = _asks(calls.rerank)
    tokenize = _asks(calls.tokenize)
    detokenize = _asks(calls.detokenize)
    models = _asks(calls.models)
    ready = _asks(calls.ready)

    async def _run(self, call: Call[P, R]) -> R:
        deadline = self._settings.deadline(call.timeout_s, anyio.current_time())
        parts = call.parts()
        begun = list(islice(parts, self._settings.concurrency))
        parts = chain(begun, parts)
        found: dict[int, P] = {}
        errors: list[StagedPoolError] = []

        async def work(advance: Callable[[int], None], tasks: anyio.CancelScope) -> None:
            stretch = whole = Stretch(0, call.total)
            try:
                for part in parts:
                    stretch = part.stretch
                    answer = await self._answer(part.request, deadline, self._ask)
                    found[part.number] = call.read(answer, stretch.count)
                    advance(stretch.count)
                    stretch = whole
            except StagedPoolError as error:
                # Not raised: a task group would wrap it, and the caller is to catch it by its class.
                errors.append(located(error, stretch, call.total))
                tasks.cancel()

        with shown(call.progress, call.total) as advance:
            if len(begun) == 1:
                await work(advance, anyio.CancelScope())
            else:
                async with anyio.create_task_group() as tasks:
                    for _ in begun:
                        tasks.start_soon(work, advance, tasks.cancel_scope)
        if errors:
            raise errors[0]
        return call.join([found[number] for number in sorted(found)])

    async def _vectors(
        self, call: Streamed, deadline: float, stream: AsyncEmbeddingStream
    ) -> AsyncGenerator[Vector, None]:
        prompt_tokens = 0
        for part in call.parts:
            opened: list[httpx.Response] = []
            try:
                answer = await self._answer(part.request, deadline, partial(self._open, opened))
            except StagedPoolError as error:
                raise located(error, part.stretch, call.total) from error.__cause__
            async with aclosing(opened[-1]) as response:
                lines = VectorLines(answer, part.stretch, call.total)
                try:
                    async for chunk in response.aiter_bytes():
                        for vector in lines.feed(chunk):
                            yield vector
                        self._settings.check(deadline, anyio.current_time())
                except httpx.RequestError as error:
                    raise located(lost(error), part.stretch, call.total) from error
                for vector in lines.end():
                    yield vector
            prompt_tokens += lines.prompt_tokens or 0
        stream.usage = Usage(prompt_tokens)

    async def _answer(
        self, request: Request, deadline: float, ask: Callable[[Ask], Awaitable[Answer | NoAnswer]]
    ) -> Answer:
        """Drive one exchange to its end."""
        steps = self._settings.exchange(request, anyio.current_time, deadline)
        outcome: Outcome = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as end:
                answer: Answer = end.value
                return answer
            if isinstance(step, Pause):
                await anyio.sleep(step.seconds)
                outcome = None
            else:
                outcome = await ask(step)

    async def _ask(self, ask: Ask) -> Answer | NoAnswer:
        try:
            with anyio.move_on_after(ask.timeout_s):
                async with aclosing(await self._send(ask)) as response:
                    body = await response.aread()
                    return Answer(response.status_code, headers_of(response), body)
            return NoAnswer("timeout")
        except httpx.RequestError as error:
            return failure(error)

    async def _open(self, opened: list[httpx.Response], ask: Ask) -> Answer | NoAnswer:
        """As `_ask`; a result is left open, in `opened`."""
        try:
            response = await self._send(ask)
            if response.status_code in ask.results:
                opened.append(response)
                return Answer(response.status_code, headers_of(response))
            async with aclosing(response):
                return Answer(response.status_code, headers_of(response), await response.aread())
        except httpx.RequestError as error:
            return failure(error)

    async def _send(self, ask: Ask) -> httpx.Response:
        body = ask.body or b""
        headers = {**ask.headers, "content-length": str(len(body))} if body else ask.headers
        request = self._http.build_request(ask.method, ask.path, headers=headers, timeout=self._settings.timeouts(ask))
        if body:
            request.stream = _Whole(body)
        return await self._http.send(request, stream=True)


class _Whole(httpx.AsyncByteStream):
    """A body in one piece. That of httpx is an async generator, of which trio complains where sending is cancelled."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def __aiter__(self) -> AsyncIterator[bytes]:
        return _Pieces(self._body)


class _Pieces(AsyncIterator[bytes]):
    def __init__(self, *pieces: bytes) -> None:
        self._pieces = iter(pieces)

    async def __anext__(self) -> bytes:
        for piece in self._pieces:
            return piece
        raise StopAsyncIteration


class AsyncEmbeddingStream(AsyncIterator[Vector]):
    """Which input, counted over the whole list, and its vector: float32 [width]; in the order in which they came."""

    vectors: AsyncGenerator[Vector, None]

    def __init__(self) -> None:
        self.usage: Usage | None = None
        """What it cost; None until the last vector was taken."""

    async def __anext__(self) -> Vector:
        return await anext(self.vectors)
