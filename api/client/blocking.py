"""The client for programs that block: carries bytes, and waits."""

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

from staged_pool.client import calls
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


def _asks(build: Callable[Concatenate[Options, A], Call[P, R]]) -> Callable[Concatenate[Client, A], R]:
    """The method that makes a call."""

    @wraps(build)
    def method(self: Client, /, *args: A.args, **kwargs: A.kwargs) -> R:
        return self._run(build(self._settings.options, *args, **kwargs))

    return method


def _streams(
    build: Callable[Concatenate[Options, A], Streamed],
) -> Callable[Concatenate[Client, A], AbstractContextManager[EmbeddingStream]]:
    """The method that makes a call whose answers are read in lines."""

    @contextmanager
    @wraps(build)
    def method(self: Client, /, *args: A.args, **kwargs: A.kwargs) -> Iterator[EmbeddingStream]:
        call = build(self._settings.options, *args, **kwargs)
        deadline = self._settings.deadline(call.timeout_s, time.monotonic())
        with closing(self._vectors(call, deadline)) as vectors:
            yield EmbeddingStream(vectors)

    return method


class Client(Configured):
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
        """End all connections."""
        self._http.close()

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

    def _run(self, call: Call[P, R]) -> R:
        deadline = self._settings.deadline(call.timeout_s, time.monotonic())
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

        with shown(call.progress, call.total) as advance:
            if len(begun) == 1:
                work(advance)
            else:
                _in_threads(lambda: work(advance), len(begun), ended)
        return call.join([found[number] for number in sorted(found)])

    def _vectors(self, call: Streamed, deadline: float) -> Generator[Vector, None, Usage]:
        prompt_tokens = 0
        for part in call.parts:
            opened: list[httpx.Response] = []
            try:
                answer = self._answer(part.request, deadline, partial(self._open, opened))
            except StagedPoolError as error:
                raise located(error, part.stretch, call.total) from error.__cause__
            with closing(opened[-1]) as response:
                lines = VectorLines(answer, part.stretch, call.total)
                try:
                    for chunk in response.iter_bytes():
                        yield from lines.feed(chunk)
                        self._settings.check(deadline, time.monotonic())
                except httpx.RequestError as error:
                    raise located(lost(error), part.stretch, call.total) from error
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
