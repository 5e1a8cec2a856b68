"""The client for asyncio and trio: carries bytes, and waits."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from itertools import chain, islice
from types import TracebackType
from typing import TypeVar

import anyio
import httpx

from staged_pool.client import calls
from staged_pool.client.batches import Stretch
from staged_pool.client.calls import Call, Part
from staged_pool.client.errors import located
from staged_pool.client.exchange import Answer, Ask, NoAnswer, Outcome, Pause, Request
from staged_pool.client.progress import Progress, shown
from staged_pool.client.results import EntitiesResult, Readiness, ServedModel, TokensResult
from staged_pool.client.retry import RetryPolicy
from staged_pool.client.settings import BASE_URL, Settings, failure, headers_of, lost
from staged_pool.client.streaming import Vector, VectorLines
from staged_pool.runtime.arguments import Inputs
from staged_pool.runtime.requests import DENSE_ONLY, Aggregation, Content, Output
from staged_pool.runtime.results import ClassifyResult, EmbedResult, RerankResult, ScoreResult, Usage
from staged_pool.stages.errors import StagedPoolError

P = TypeVar("P")
R = TypeVar("R")


class AsyncClient:
    """`Client` for a program that runs on asyncio or trio; see there for the arguments, and for what is raised.

    Belongs to one event loop, and any number of its tasks. Close it, or use it in an `async with` block. Cancelling a
    call ends its requests, and the server lets go of them.
    """

    def __init__(
        self,
        base_url: str = BASE_URL,
        *,
        unix_socket: str | os.PathLike[str] | None = None,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = math.inf,
        attempt_timeout_s: float = 60.0,
        connect_timeout_s: float = 5.0,
        retry: RetryPolicy | None = None,
        batch_items: int = 128,
        concurrency: int = 4,
    ) -> None:
        self._settings = Settings(
            base_url=base_url,
            unix_socket=unix_socket,
            api_key=api_key,
            model=model,
            timeout_s=timeout_s,
            attempt_timeout_s=attempt_timeout_s,
            connect_timeout_s=connect_timeout_s,
            retry=retry or RetryPolicy(),
            batch_items=batch_items,
            concurrency=concurrency,
        )
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

    async def embed(
        self,
        inputs: Inputs,
        *,
        outputs: Output | str | Iterable[Output | str] = DENSE_ONLY,
        dimensions: int | None = None,
        normalize: bool = True,
        prompt_name: str | None = None,
        prompt: str | None = None,
        max_tokens: int | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        progress: Progress = False,
    ) -> EmbedResult:
        """See `Client.embed`."""
        call = calls.embed(
            self._settings.options(model),
            inputs,
            outputs=outputs,
            dimensions=dimensions,
            normalize=normalize,
            prompt_name=prompt_name,
            prompt=prompt,
            max_tokens=max_tokens,
        )
        return await self._run(call, timeout_s, progress)

    @asynccontextmanager
    async def embed_stream(
        self,
        inputs: Inputs,
        *,
        dimensions: int | None = None,
        normalize: bool = True,
        prompt_name: str | None = None,
        prompt: str | None = None,
        max_tokens: int | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[AsyncEmbeddingStream]:
        """See `Client.embed_stream`."""
        total, parts = calls.embed_stream(
            self._settings.options(model),
            inputs,
            dimensions=dimensions,
            normalize=normalize,
            prompt_name=prompt_name,
            prompt=prompt,
            max_tokens=max_tokens,
        )
        stream = AsyncEmbeddingStream()
        deadline = self._settings.deadline(timeout_s, anyio.current_time())
        async with aclosing(self._vectors(parts, total, deadline, stream)) as vectors:
            stream.vectors = vectors
            yield stream

    async def classify(
        self,
        inputs: Inputs | Sequence[tuple[str, str]],
        *,
        activate: bool = True,
        max_tokens: int | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        progress: Progress = False,
    ) -> ClassifyResult:
        """See `Client.classify`."""
        call = calls.classify(self._settings.options(model), inputs, activate=activate, max_tokens=max_tokens)
        return await self._run(call, timeout_s, progress)

    async def classify_tokens(
        self,
        inputs: str | Sequence[str],
        *,
        aggregation: Aggregation = "simple",
        max_tokens: int | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        progress: Progress = False,
    ) -> EntitiesResult:
        """See `Client.classify_tokens`."""
        call = calls.classify_tokens(
            self._settings.options(model), inputs, aggregation=aggregation, max_tokens=max_tokens
        )
        return await self._run(call, timeout_s, progress)

    async def score(
        self,
        queries: Content | Sequence[Content],
        documents: Content | Sequence[Content],
        *,
        activate: bool = True,
        instruction: str | None = None,
        max_tokens: int | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        progress: Progress = False,
    ) -> ScoreResult:
        """See `Client.score`."""
        call = calls.score(
            self._settings.options(model),
            queries,
            documents,
            activate=activate,
            instruction=instruction,
            max_tokens=max_tokens,
        )
        return await self._run(call, timeout_s, progress)

    async def rerank(
        self,
        query: Content,
        documents: Content | Sequence[Content],
        *,
        top_n: int | None = None,
        activate: bool = True,
        instruction: str | None = None,
        max_tokens: int | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        progress: Progress = False,
    ) -> RerankResult:
        """See `Client.rerank`."""
        call = calls.rerank(
            self._settings.options(model),
            query,
            documents,
            top_n=top_n,
            activate=activate,
            instruction=instruction,
            max_tokens=max_tokens,
        )
        return await self._run(call, timeout_s, progress)

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, model: str | None = None, timeout_s: float | None = None
    ) -> TokensResult:
        """See `Client.tokenize`."""
        call = calls.tokenize(self._settings.options(model), text, add_special_tokens=add_special_tokens)
        return await self._run(call, timeout_s)

    async def detokenize(self, ids: Sequence[int], *, model: str | None = None, timeout_s: float | None = None) -> str:
        """See `Client.detokenize`."""
        return await self._run(calls.detokenize(self._settings.options(model), ids), timeout_s)

    async def models(self, *, timeout_s: float | None = None) -> tuple[ServedModel, ...]:
        """See `Client.models`."""
        return await self._run(calls.models(), timeout_s)

    async def ready(self, *, timeout_s: float | None = None) -> Readiness:
        """See `Client.ready`."""
        return await self._run(calls.ready(), timeout_s)

    async def _run(self, call: Call[P, R], timeout_s: float | None, progress: Progress = False) -> R:
        deadline = self._settings.deadline(timeout_s, anyio.current_time())
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

        with shown(progress, call.total) as advance:
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
        self, parts: Iterator[Part], total: int, deadline: float, stream: AsyncEmbeddingStream
    ) -> AsyncGenerator[Vector, None]:
        prompt_tokens = 0
        for part in parts:
            opened: list[httpx.Response] = []
            try:
                answer = await self._answer(part.request, deadline, partial(self._open, opened))
            except StagedPoolError as error:
                raise located(error, part.stretch, total) from error.__cause__
            async with aclosing(opened[-1]) as response:
                lines = VectorLines(answer, part.stretch, total)
                try:
                    async for chunk in response.aiter_bytes():
                        for vector in lines.feed(chunk):
                            yield vector
                        self._settings.check(deadline, anyio.current_time())
                except httpx.RequestError as error:
                    raise located(lost(error), part.stretch, total) from error
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
