"""The client for programs that block: carries bytes, and waits."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain, islice
from types import TracebackType
from typing import TypeVar

import httpx

from staged_pool.client import calls
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


class Client:
    """Asks a server what an engine can be asked in process, by the same names, and gives the same results.

    Belongs to any number of threads. Close it, or use it in a `with` block. Every method raises the error of
    `staged_pool` that the engine raised on the other side (`InvalidInput`, `Overloaded`, `ModelFailed`, ...), or a
    `ClientError`. Its `timeout_s` bounds all it does, retries and their pauses included; None is the client's own.

    Long lists go out in batches, several at a time, and come back as one result in the order of the inputs. The first
    batch that fails ends the call; its error names the inputs that it held, and `index` counts over the whole list.

    Args:
        base_url: Where the server is.
        unix_socket: Path of a Unix socket to connect to, instead of the host and port of `base_url`.
        api_key: Sent as `Authorization: Bearer`.
        model: The served name of the model to ask. None: the first that can do the task.
        timeout_s: For each call. math.inf: no limit, but for the one on each try.
        attempt_timeout_s: For each try of a request. The server is told, and gives up at the same time.
        connect_timeout_s: For making a connection.
        retry: When a request that was not taken is sent again.
        batch_items: Inputs in one request. More cost less each, and are all lost if one of them is wrong.
        concurrency: Requests at once, of one call. More keep a server busier that others use, too.

    Raises:
        ConfigError: A value is out of its range; the message names it.
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
        transport = None if path is None else httpx.HTTPTransport(uds=path, limits=self._settings.limits)
        self._http = httpx.Client(transport=transport, **self._settings.http())

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all connections."""
        self._http.close()

    def embed(
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
        """Vectors of each input; see `Engine.embed` for the arguments and the result.

        Args:
            inputs: Inputs, or the token ids of texts.
            outputs: Any of `dense`, `sparse` and `multi_vector`.
            dimensions: Keep the first so many values of each dense vector, normalised again.
            normalize: False returns vectors as pooled.
            prompt_name: Put this one of the model's prompts before each text.
            prompt: Put this before each text.
            max_tokens: Cut longer inputs to so many tokens, `MODEL_MAX` to what the model takes; None refuses them.
            model: Ask this one rather than the client's own.
            timeout_s: See the class.
            progress: See `Progress`.
        """
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
        return self._run(call, timeout_s, progress)

    @contextmanager
    def embed_stream(
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
    ) -> Iterator[EmbeddingStream]:
        """Dense vectors as the server makes them: for lists whose result is too large to hold, or needed early.

        The batches go out one after the other. A request is repeated only before its first vector came. Leaving the
        block early ends the request on the server. For the arguments see `embed`.
        """
        total, parts = calls.embed_stream(
            self._settings.options(model),
            inputs,
            dimensions=dimensions,
            normalize=normalize,
            prompt_name=prompt_name,
            prompt=prompt,
            max_tokens=max_tokens,
        )
        deadline = self._settings.deadline(timeout_s, time.monotonic())
        with closing(self._vectors(parts, total, deadline)) as vectors:
            yield EmbeddingStream(vectors)

    def classify(
        self,
        inputs: Inputs | Sequence[tuple[str, str]],
        *,
        activate: bool = True,
        max_tokens: int | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        progress: Progress = False,
    ) -> ClassifyResult:
        """How well each of the model's labels fits each input or pair of texts; see `Engine.classify`."""
        call = calls.classify(self._settings.options(model), inputs, activate=activate, max_tokens=max_tokens)
        return self._run(call, timeout_s, progress)

    def classify_tokens(
        self,
        inputs: str | Sequence[str],
        *,
        aggregation: Aggregation = "simple",
        max_tokens: int | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        progress: Progress = False,
    ) -> EntitiesResult:
        """The entities in each text; see `Engine.classify_tokens`. Scores of single tokens stay on the server."""
        call = calls.classify_tokens(
            self._settings.options(model), inputs, aggregation=aggregation, max_tokens=max_tokens
        )
        return self._run(call, timeout_s, progress)

    def score(
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
        """How well each document answers its query; see `Engine.score`.

        Without `max_tokens` long documents are cut to what the model takes, as the server does it for scores.
        """
        call = calls.score(
            self._settings.options(model),
            queries,
            documents,
            activate=activate,
            instruction=instruction,
            max_tokens=max_tokens,
        )
        return self._run(call, timeout_s, progress)

    def rerank(
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
        """Documents in the order of how well they answer a query, the best first; see `Engine.rerank` and `score`."""
        call = calls.rerank(
            self._settings.options(model),
            query,
            documents,
            top_n=top_n,
            activate=activate,
            instruction=instruction,
            max_tokens=max_tokens,
        )
        return self._run(call, timeout_s, progress)

    def tokenize(
        self, text: str, *, add_special_tokens: bool = True, model: str | None = None, timeout_s: float | None = None
    ) -> TokensResult:
        """The token ids of a text, and what each stands for."""
        call = calls.tokenize(self._settings.options(model), text, add_special_tokens=add_special_tokens)
        return self._run(call, timeout_s)

    def detokenize(self, ids: Sequence[int], *, model: str | None = None, timeout_s: float | None = None) -> str:
        """The text that token ids spell."""
        return self._run(calls.detokenize(self._settings.options(model), ids), timeout_s)

    def models(self, *, timeout_s: float | None = None) -> tuple[ServedModel, ...]:
        """What is served; the first is the one that is asked where no model is named."""
        return self._run(calls.models(), timeout_s)

    def ready(self, *, timeout_s: float | None = None) -> Readiness:
        """Whether the server takes requests, and why not. Raises `ConnectionFailed` where there is none."""
        return self._run(calls.ready(), timeout_s)

    def _run(self, call: Call[P, R], timeout_s: float | None, progress: Progress = False) -> R:
        deadline = self._settings.deadline(timeout_s, time.monotonic())
        parts = call.parts()
        begun = list(islice(parts, self._settings.concurrency))
        parts = chain(begun, parts)
        found: dict[int, P] = {}
        turn, ended = threading.Lock(), threading.Event()

        def work(advance: Callable[[int], None]) -> None:
            while not ended.is_set():
                with turn:
                    part = next(parts, None)
                if part is None:
                    return
                try:
                    answer = self._answer(part.request, deadline, self._ask, ended.wait)
                    found[part.number] = call.read(answer, part.stretch.count)
                except StagedPoolError as error:
                    raise located(error, part.stretch, call.total) from error.__cause__
                with turn:
                    advance(part.stretch.count)

        with shown(progress, call.total) as advance:
            if len(begun) == 1:
                work(advance)
            else:
                _in_threads(lambda: work(advance), len(begun), ended)
        return call.join([found[number] for number in sorted(found)])

    def _vectors(self, parts: Iterator[Part], total: int, deadline: float) -> Generator[Vector, None, Usage]:
        prompt_tokens = 0
        for part in parts:
            opened: list[httpx.Response] = []
            try:
                answer = self._answer(part.request, deadline, partial(self._open, opened))
            except StagedPoolError as error:
                raise located(error, part.stretch, total) from error.__cause__
            with closing(opened[-1]) as response:
                lines = VectorLines(answer, part.stretch, total)
                try:
                    for chunk in response.iter_bytes():
                        yield from lines.feed(chunk)
                        self._settings.check(deadline, time.monotonic())
                except httpx.RequestError as error:
                    raise located(lost(error), part.stretch, total) from error
                yield from lines.end()
            prompt_tokens += lines.prompt_tokens or 0
        return Usage(prompt_tokens)

    def _answer(
        self,
        request: Request,
        deadline: float,
        ask: Callable[[Ask], Answer | NoAnswer],
        pause: Callable[[float], bool | None] = time.sleep,
    ) -> Answer:
        """Drive one exchange to its end. `pause` says whether the call has ended meanwhile."""
        steps = self._settings.exchange(request, time.monotonic, deadline)
        outcome: Outcome = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as end:
                answer: Answer = end.value
                return answer
            if isinstance(step, Pause):
                if pause(step.seconds):
                    raise _Ended
                outcome = None
            else:
                outcome = ask(step)

    def _ask(self, ask: Ask) -> Answer | NoAnswer:
        ends = time.monotonic() + ask.timeout_s
        body = bytearray()
        try:
            with closing(self._send(ask)) as response:
                for chunk in response.iter_bytes():
                    body += chunk
                    if time.monotonic() > ends:  # each piece came in time, but all of them did not
                        return NoAnswer("timeout")
                return Answer(response.status_code, headers_of(response), bytes(body))
        except httpx.RequestError as error:
            return failure(error)

    def _open(self, opened: list[httpx.Response], ask: Ask) -> Answer | NoAnswer:
        """As `_ask`; a result is left open, in `opened`."""
        try:
            response = self._send(ask)
            if response.status_code in ask.results:
                opened.append(response)
                return Answer(response.status_code, headers_of(response))
            with closing(response):
                return Answer(response.status_code, headers_of(response), response.read())
        except httpx.RequestError as error:
            return failure(error)

    def _send(self, ask: Ask) -> httpx.Response:
        request = self._http.build_request(
            ask.method, ask.path, content=ask.body, headers=ask.headers, timeout=self._settings.timeouts(ask)
        )
        return self._http.send(request, stream=True)


class EmbeddingStream(Iterator[Vector]):
    """Which input, counted over the whole list, and its vector: float32 [width]; in the order in which they came."""

    def __init__(self, vectors: Generator[Vector, None, Usage]) -> None:
        self._vectors = vectors
        self.usage: Usage | None = None
        """What it cost; None until the last vector was taken."""

    def __next__(self) -> Vector:
        try:
            return next(self._vectors)
        except StopIteration as end:
            self.usage = end.value or self.usage
            raise


class _Ended(Exception):
    """Another request of the same call has failed: nobody waits for this one."""


def _in_threads(work: Callable[[], None], threads: int, ended: threading.Event) -> None:
    """Work in so many threads at once, until all are done or one raises; then none begins anything more."""
    with ThreadPoolExecutor(threads, "staged-pool client") as pool:
        workers = [pool.submit(work) for _ in range(threads)]
        try:
            for worker in as_completed(workers):
                worker.result()
        finally:
            ended.set()
