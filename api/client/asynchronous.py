"""The client for asyncio and trio: sends bytes, and waits."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial, wraps
from itertools import chain, islice
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import anyio
import httpx

from staged_pool.client import embedding_calls, scoring_calls, server_calls
from staged_pool.client.exchange import Attempt, NoAnswer, Pause, ServerAnswer, ServerRequest, StepOutcome
from staged_pool.client.plans import CallDefaults, CallPlan, StreamPlan
from staged_pool.client.settings import BaseClient, failure, headers_of, lost
from staged_pool.client.streaming import Vector, VectorLines
from staged_pool.runtime.input_ranges import InputRange, with_input_range
from staged_pool.runtime.progress import reporting
from staged_pool.runtime.results import Usage
from staged_pool.stages.errors import StagedPoolError

A = ParamSpec("A")
P = TypeVar("P")
R = TypeVar("R")


def _call_method(
    build: Callable[Concatenate[CallDefaults, A], CallPlan[P, R]],
) -> Callable[Concatenate[AsyncClient, A], Coroutine[Any, Any, R]]:
    """Make the method that sends a call."""

    @wraps(build)
    async def method(self: AsyncClient, /, *args: A.args, **kwargs: A.kwargs) -> R:
        return await self._run(build(self._settings.call_defaults, *args, **kwargs))

    return method


def _stream_method(
    build: Callable[Concatenate[CallDefaults, A], StreamPlan],
) -> Callable[Concatenate[AsyncClient, A], AbstractAsyncContextManager[AsyncEmbeddingStream]]:
    """Make the method that sends a call with streamed answers."""

    @asynccontextmanager
    @wraps(build)
    async def method(self: AsyncClient, /, *args: A.args, **kwargs: A.kwargs) -> AsyncIterator[AsyncEmbeddingStream]:
        call = build(self._settings.call_defaults, *args, **kwargs)
        stream = AsyncEmbeddingStream()
        deadline = self._settings.deadline(call.timeout_s, anyio.current_time())
        async with aclosing(self._vectors(call, deadline, stream)) as vectors:
            stream.vectors = vectors
            yield stream

    return method


class AsyncClient(BaseClient):
    """Client for programs on asyncio or trio; see `Client` for the arguments and the errors.

    All tasks of one event loop can share it. Close it, or use it in an `async with` block. Cancelling a call ends its
    requests, and the server abandons them.
    """

    _http: httpx.AsyncClient

    def _connect(self) -> None:
        path = self._settings.socket_path
        transport = None if path is None else httpx.AsyncHTTPTransport(uds=path, limits=self._settings.limits)
        self._http = httpx.AsyncClient(transport=transport, **self._settings.http())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    embed = _call_method(embedding_calls.embed)
    embed_stream = _stream_method(embedding_calls.embed_stream)
    classify = _call_method(scoring_calls.classify)
    classify_tokens = _call_method(scoring_calls.classify_tokens)
    score = _call_method(scoring_calls.score)
    rerank = _call_method(scoring_calls.rerank)
    tokenize = _call_method(server_calls.tokenize)
    detokenize = _call_method(server_calls.detokenize)
    models = _call_method(server_calls.models)
    ready = _call_method(server_calls.ready)

    async def _run(self, call: CallPlan[P, R]) -> R:
        deadline = self._settings.deadline(call.timeout_s, anyio.current_time())
        batches = call.batches()
        begun = list(islice(batches, self._settings.concurrency))
        batches = chain(begun, batches)
        found: dict[int, P] = {}
        errors: list[StagedPoolError] = []

        async def work(advance: Callable[[int], None], tasks: anyio.CancelScope) -> None:
            input_range = whole = InputRange(0, call.total)
            try:
                for batch in batches:
                    input_range = batch.input_range
                    answer = await self._answer(batch.request, deadline, self._exchange_once)
                    found[batch.number] = call.read(answer, input_range.count)
                    advance(input_range.count)
                    input_range = whole
            except StagedPoolError as error:
                # Not raised: a task group would wrap it, but the caller catches it by its class.
                errors.append(with_input_range(error, input_range, call.total))
                tasks.cancel()

        with reporting(call.progress, call.total) as advance:
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
        self, call: StreamPlan, deadline: float, stream: AsyncEmbeddingStream
    ) -> AsyncGenerator[Vector, None]:
        prompt_tokens = 0
        for batch in call.batches:
            opened: list[httpx.Response] = []
            try:
                answer = await self._answer(batch.request, deadline, partial(self._open, opened))
            except StagedPoolError as error:
                raise with_input_range(error, batch.input_range, call.total) from error.__cause__
            async with aclosing(opened[-1]) as response:
                lines = VectorLines(answer, batch.input_range, call.total)
                try:
                    async for chunk in response.aiter_bytes():
                        for vector in lines.feed(chunk):
                            yield vector
                        self._settings.check(deadline, anyio.current_time())
                except httpx.RequestError as error:
                    raise with_input_range(lost(error), batch.input_range, call.total) from error
                for vector in lines.end():
                    yield vector
            prompt_tokens += lines.prompt_tokens or 0
        stream.usage = Usage(prompt_tokens)

    async def _answer(
        self, request: ServerRequest, deadline: float, send: Callable[[Attempt], Awaitable[ServerAnswer | NoAnswer]]
    ) -> ServerAnswer:
        """Run one exchange to its end."""
        steps = self._settings.exchange(request, anyio.current_time, deadline)
        outcome: StepOutcome = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as end:
                answer: ServerAnswer = end.value
                return answer
            if isinstance(step, Pause):
                await anyio.sleep(step.seconds)
                outcome = None
            else:
                outcome = await send(step)

    async def _exchange_once(self, attempt: Attempt) -> ServerAnswer | NoAnswer:
        try:
            with anyio.move_on_after(attempt.timeout_s):
                async with aclosing(await self._send(attempt)) as response:
                    body = await response.aread()
                    return ServerAnswer(response.status_code, headers_of(response), body)
            return NoAnswer("timeout")
        except httpx.RequestError as error:
            return failure(error, self._settings)

    async def _open(self, opened: list[httpx.Response], attempt: Attempt) -> ServerAnswer | NoAnswer:
        """Send one attempt; the response of a result is appended to `opened`, with its body unread."""
        try:
            response = await self._send(attempt)
            if response.status_code in attempt.results:
                opened.append(response)
                return ServerAnswer(response.status_code, headers_of(response))
            async with aclosing(response):
                return ServerAnswer(response.status_code, headers_of(response), await response.aread())
        except httpx.RequestError as error:
            return failure(error, self._settings)

    async def _send(self, attempt: Attempt) -> httpx.Response:
        body = attempt.body or b""
        headers = {**attempt.headers, "content-length": str(len(body))} if body else attempt.headers
        request = self._http.build_request(
            attempt.method, attempt.path, headers=headers, timeout=self._settings.timeouts(attempt)
        )
        if body:
            request.stream = _OnePiece(body)
        return await self._http.send(request, stream=True)


class _OnePiece(httpx.AsyncByteStream):
    """Body in one piece.

    That of httpx is an async generator, about which trio warns if sending is cancelled.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body

    def __aiter__(self) -> AsyncIterator[bytes]:
        return _Chunks(self._body)


class _Chunks(AsyncIterator[bytes]):
    def __init__(self, *chunks: bytes) -> None:
        self._chunks = iter(chunks)

    async def __anext__(self) -> bytes:
        for chunk in self._chunks:
            return chunk
        raise StopAsyncIteration


class AsyncEmbeddingStream(AsyncIterator[Vector]):
    """Iterator over the vectors of a stream, in the order in which they arrive.

    Each element is the index of the input in the whole list, and its vector: float32 [width].
    """

    vectors: AsyncGenerator[Vector, None]

    def __init__(self) -> None:
        self.usage: Usage | None = None
        """Usage of the call; None until the iterator is exhausted."""

    async def __anext__(self) -> Vector:
        return await anext(self.vectors)
