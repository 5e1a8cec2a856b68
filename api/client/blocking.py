"""The client for blocking programs: sends bytes, and waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial, wraps
from itertools import chain, islice
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar

import httpx

from staged_pool.client import embedding_calls, scoring_calls, server_calls
from staged_pool.client.exchange import Attempt, NoAnswer, Pause, ServerAnswer, ServerRequest, StepOutcome
from staged_pool.client.plans import CallDefaults, CallPlan, StreamPlan
from staged_pool.client.settings import BaseClient, failure, headers_of, lost
from staged_pool.client.streaming import Vector, VectorLines
from staged_pool.runtime.input_ranges import with_input_range
from staged_pool.runtime.progress import reporting
from staged_pool.runtime.results import Usage
from staged_pool.stages.errors import StagedPoolError

A = ParamSpec("A")
P = TypeVar("P")
R = TypeVar("R")


def _call_method(build: Callable[Concatenate[CallDefaults, A], CallPlan[P, R]]) -> Callable[Concatenate[Client, A], R]:
    """Make the method that sends a call."""

    @wraps(build)
    def method(self: Client, /, *args: A.args, **kwargs: A.kwargs) -> R:
        return self._run(build(self._settings.call_defaults, *args, **kwargs))

    return method


def _stream_method(
    build: Callable[Concatenate[CallDefaults, A], StreamPlan],
) -> Callable[Concatenate[Client, A], AbstractContextManager[EmbeddingStream]]:
    """Make the method that sends a call with streamed answers."""

    @contextmanager
    @wraps(build)
    def method(self: Client, /, *args: A.args, **kwargs: A.kwargs) -> Iterator[EmbeddingStream]:
        call = build(self._settings.call_defaults, *args, **kwargs)
        deadline = self._settings.deadline(call.timeout_s, time.monotonic())
        with closing(self._vectors(call, deadline)) as vectors:
            yield EmbeddingStream(vectors)

    return method


class Client(BaseClient):
    """Client of a server, with the methods and results of `Engine`.

    Threads can share it. Close it, or use it in a `with` block.

    A method raises the same error of `staged_pool` as the engine would in process (`InvalidInput`, `Overloaded`,
    `ModelFailed`, ...), or a `ClientError`. The `timeout_s` of a method is the limit for the whole call in seconds,
    retries and their pauses included; None: the client's own.

    Long lists are sent in batches, several at a time. They return one result, in the order of the inputs. The first
    batch that fails ends the call. Its error names the inputs of the batch, and `index` is that in the whole list.

    Args:
        base_url: Address of the server.
        unix_socket: Path of a Unix socket to connect to, instead of the host and port of `base_url`.
        api_key: API key, sent as `Authorization: Bearer`.
        model: Served name of the model. None: the first one that can do the task.
        timeout_s: Limit for each call, in seconds. math.inf: only that for each attempt.
        attempt_timeout_s: Limit for each attempt of a request, in seconds. The server gets it as a deadline.
        connect_timeout_s: Limit for opening a connection, in seconds.
        retry: Policy for retries.
        batch_items: Inputs of one request. More cost less each, but all of them fail if one is wrong.
        concurrency: Concurrent requests of one call. More leave less of the server to other clients.

    Raises:
        ConfigError: A value is out of its range; the message names it.
    """

    _http: httpx.Client

    def _connect(self) -> None:
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
        """Close all connections."""
        self._http.close()

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

    def _run(self, call: CallPlan[P, R]) -> R:
        deadline = self._settings.deadline(call.timeout_s, time.monotonic())
        batches = call.batches()
        begun = list(islice(batches, self._settings.concurrency))
        batches = chain(begun, batches)
        found: dict[int, P] = {}
        lock, ended = threading.Lock(), threading.Event()  # the lock guards `batches` and `advance`

        def work(advance: Callable[[int], None]) -> None:
            while not ended.is_set():
                with lock:
                    batch = next(batches, None)
                if batch is None:
                    return
                try:
                    answer = self._answer(batch.request, deadline, self._exchange_once, ended.wait)
                    found[batch.number] = call.read(answer, batch.input_range.count)
                except StagedPoolError as error:
                    raise with_input_range(error, batch.input_range, call.total) from error.__cause__
                with lock:
                    advance(batch.input_range.count)

        with reporting(call.progress, call.total) as advance:
            if len(begun) == 1:
                work(advance)
            else:
                _in_threads(lambda: work(advance), len(begun), ended)
        return call.join([found[number] for number in sorted(found)])

    def _vectors(self, call: StreamPlan, deadline: float) -> Generator[Vector, None, Usage]:
        prompt_tokens = 0
        for batch in call.batches:
            opened: list[httpx.Response] = []
            try:
                answer = self._answer(batch.request, deadline, partial(self._open, opened))
            except StagedPoolError as error:
                raise with_input_range(error, batch.input_range, call.total) from error.__cause__
            with closing(opened[-1]) as response:
                lines = VectorLines(answer, batch.input_range, call.total)
                try:
                    for chunk in response.iter_bytes():
                        yield from lines.feed(chunk)
                        self._settings.check(deadline, time.monotonic())
                except httpx.RequestError as error:
                    raise with_input_range(lost(error), batch.input_range, call.total) from error
                yield from lines.end()
            prompt_tokens += lines.prompt_tokens or 0
        return Usage(prompt_tokens)

    def _answer(
        self,
        request: ServerRequest,
        deadline: float,
        send: Callable[[Attempt], ServerAnswer | NoAnswer],
        pause: Callable[[float], bool | None] = time.sleep,
    ) -> ServerAnswer:
        """Run one exchange to its end. `pause` returns True if the call has ended meanwhile."""
        steps = self._settings.exchange(request, time.monotonic, deadline)
        outcome: StepOutcome = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as end:
                answer: ServerAnswer = end.value
                return answer
            if isinstance(step, Pause):
                if pause(step.seconds):
                    raise _CallEnded
                outcome = None
            else:
                outcome = send(step)

    def _exchange_once(self, attempt: Attempt) -> ServerAnswer | NoAnswer:
        ends = time.monotonic() + attempt.timeout_s
        body = bytearray()
        try:
            with closing(self._send(attempt)) as response:
                for chunk in response.iter_bytes():
                    body += chunk
                    if time.monotonic() > ends:  # httpx limits the time of each read, not of all
                        return NoAnswer("timeout")
                return ServerAnswer(response.status_code, headers_of(response), bytes(body))
        except httpx.RequestError as error:
            return failure(error, self._settings)

    def _open(self, opened: list[httpx.Response], attempt: Attempt) -> ServerAnswer | NoAnswer:
        """Send one attempt; the response of a result is appended to `opened`, with its body unread."""
        try:
            response = self._send(attempt)
            if response.status_code in attempt.results:
                opened.append(response)
                return ServerAnswer(response.status_code, headers_of(response))
            with closing(response):
                return ServerAnswer(response.status_code, headers_of(response), response.read())
        except httpx.RequestError as error:
            return failure(error, self._settings)

    def _send(self, attempt: Attempt) -> httpx.Response:
        request = self._http.build_request(
            attempt.method,
            attempt.path,
            content=attempt.body,
            headers=attempt.headers,
            timeout=self._settings.timeouts(attempt),
        )
        return self._http.send(request, stream=True)


class EmbeddingStream(Iterator[Vector]):
    """Iterator over the vectors of a stream, in the order in which they arrive.

    Each element is the index of the input in the whole list, and its vector: float32 [width].
    """

    def __init__(self, vectors: Generator[Vector, None, Usage]) -> None:
        self._vectors = vectors
        self.usage: Usage | None = None
        """Usage of the call; None until the iterator is exhausted."""

    def __next__(self) -> Vector:
        try:
            return next(self._vectors)
        except StopIteration as end:
            self.usage = end.value or self.usage
            raise


class _CallEnded(Exception):
    """Another request of the same call has failed, so this one is abandoned."""


def _in_threads(work: Callable[[], None], threads: int, ended: threading.Event) -> None:
    """Run `work` in several threads until all return or one raises; then set `ended`."""
    with ThreadPoolExecutor(threads, "staged-pool client") as pool:
        workers = [pool.submit(work) for _ in range(threads)]
        try:
            for worker in as_completed(workers):
                worker.result()
        finally:
            ended.set()
