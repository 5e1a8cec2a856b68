"""Bystanders: a client with a text every 50 ms, and a probe on new connections."""

from __future__ import annotations

import http.client
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from tests.hostile.attack import BYSTANDER_KEY
from tests.hostile.server import AttackedServer

TEXT_EVERY_S = 0.05
PROBE_EVERY_S = 0.1
AT_ONCE = 32
"""Concurrent requests of each bystander, so that a slow request does not delay the next."""

TIMEOUT_S = 10.0
"""Timeout in seconds; a usual one of clients and supervisors."""


@dataclass
class Observed:
    """Latencies and errors of one bystander."""

    seconds: list[float] = field(default_factory=list)
    """Latency of each request from its due time, including a delay before it was sent."""
    errors: list[str] = field(default_factory=list)

    def quantile_s(self, part: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else TIMEOUT_S

    @property
    def p99_s(self) -> float:
        return self.quantile_s(0.99)


@dataclass
class Both:
    """Observations of a client and a probe in the same time."""

    client: Observed = field(default_factory=Observed)
    probe: Observed = field(default_factory=Observed)

    @property
    def errors(self) -> list[str]:
        return [*(f"client: {each}" for each in self.client.errors), *(f"probe: {each}" for each in self.probe.errors)]


@contextmanager
def observing(server: AttackedServer) -> Iterator[Both]:
    """Ask a server during the block, and note how it answers."""
    both, stop = Both(), threading.Event()
    connect = partial(server.http, TIMEOUT_S)
    texts = [_Client(connect) for _ in range(AT_ONCE)]
    kinds = (
        (TEXT_EVERY_S, both.client, texts),
        (PROBE_EVERY_S, both.probe, [partial(_probe, connect) for _ in range(AT_ONCE)]),
    )
    with ExitStack() as connected, ThreadPoolExecutor(2 * AT_ONCE + len(kinds)) as pool:
        for each in texts:
            connected.callback(each.close)  # once no thread asks any more
        for interval_s, observed, clients in kinds:
            due: queue.SimpleQueue[float | None] = queue.SimpleQueue()
            pool.submit(_call_at, interval_s, due, stop)
            for ask in clients:
                pool.submit(_answer_calls, ask, observed, due)
        try:
            yield both
        finally:
            stop.set()


def _call_at(interval_s: float, due: queue.SimpleQueue[float | None], stop: threading.Event) -> None:
    """Say when the next request is due, however long the earlier ones take."""
    now = time.monotonic()
    while not stop.is_set():
        due.put(now)
        now += interval_s
        stop.wait(max(0.0, now - time.monotonic()))
    for _ in range(AT_ONCE):
        due.put(None)


def _answer_calls(ask: Callable[[], None], observed: Observed, due: queue.SimpleQueue[float | None]) -> None:
    while (began := due.get()) is not None:
        try:
            ask()
        except (OSError, http.client.HTTPException, _WrongAnswerError) as error:
            observed.errors.append(f"{type(error).__name__}: {error}")
        observed.seconds.append(time.monotonic() - began)


class _WrongAnswerError(Exception):
    pass


_NUMBERS: Final = itertools.count()
"""No text comes twice."""


class _Client:
    """A client that asks for a vector on one connection, and reconnects if needed."""

    def __init__(self, connect: Callable[[], http.client.HTTPConnection]) -> None:
        self._connect = connect
        self._connection: http.client.HTTPConnection | None = None

    def __call__(self) -> None:
        is_known = self._connection is not None
        try:
            self._ask()
        except (ConnectionError, http.client.BadStatusLine):
            if not is_known:
                raise
            self._ask()  # a connection that was idle may be closed at any time (RFC 9112, section 9.5)

    def _ask(self) -> None:
        if self._connection is None:
            self._connection = self._connect()
        body = json.dumps({"input": f"text number {next(_NUMBERS)}"})
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {BYSTANDER_KEY}"}
        try:
            self._connection.request("POST", "/v1/embeddings", body, headers)
            answer = self._connection.getresponse()
            content = answer.read()
        except BaseException:
            self.close()
            raise
        if answer.status != 200:
            raise _WrongAnswerError(f"{answer.status} {content[:200]!r}")
        if not json.loads(content)["data"]:
            raise _WrongAnswerError(f"no vector: {content[:200]!r}")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _probe(connect: Callable[[], http.client.HTTPConnection]) -> None:
    connection = connect()
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise _WrongAnswerError(str(answer.status))
    finally:
        connection.close()
