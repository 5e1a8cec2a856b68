"""Load of texts whose vectors are known: each answer is compared with the vector of its text."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from perf.tools.client import Connection, Reply, post

ROUTE: Final = "/v1/embeddings"
TOLERANCE: Final = 2e-4
"""Largest difference of a number from the known one; batches of other sizes round in other ways."""
TIMEOUT_S: Final = 60.0


class _Row(msgspec.Struct):
    embedding: list[float]


class _Body(msgspec.Struct):
    data: list[_Row]


@dataclass(slots=True)
class Counts:
    """Outcomes of the requests of clients."""

    answers: int = 0
    """Answers with the right vectors."""
    wrong: int = 0
    """Answers with status 200 and another vector."""
    rejected: int = 0
    """Answers with status 429 and `Retry-After`."""
    failed: Counter[str] = field(default_factory=Counter)
    """Other outcomes: the status, or the name of the error of a connection."""
    times_s: list[float] = field(default_factory=list)
    """Time of each right answer."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.answers + other.answers,
            self.wrong + other.wrong,
            self.rejected + other.rejected,
            self.failed + other.failed,
            self.times_s + other.times_s,
        )

    @property
    def asked(self) -> int:
        """All requests."""
        return self.answers + self.wrong + self.rejected + sum(self.failed.values())


class CheckedLoad:
    """Clients with a connection and a thread each, for the length of a block.

    Args:
        port: Port of the server on 127.0.0.1.
        vectors: Texts with their vectors, which differ by much more than `TOLERANCE`.
        clients: Number of clients. Each waits for an answer before it sends the next request.
        rate: Requests a second of all clients together, evenly spaced. None: each sends again at once.
        texts: Texts of one request.
        prefix: Path below which the server is.
    """

    def __init__(
        self,
        port: int,
        vectors: Mapping[str, NDArray[np.float32]],
        *,
        clients: int,
        rate: float | None = None,
        texts: int = 1,
        prefix: str = "",
    ) -> None:
        self._port = port
        self._requests = requests_of(vectors, texts, prefix)
        self._period_s = 0.0 if rate is None else clients / rate
        self._counts = [Counts() for _ in range(clients)]
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Self:
        self.started_at = time.perf_counter()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self.seconds = time.perf_counter() - self.started_at

    @property
    def counts(self) -> Counts:
        """The counts of all clients; they still grow inside the block."""
        return sum(self._counts, Counts())

    def _ask(self, number: int) -> None:
        counts, connection = self._counts[number], Connection(self._port, timeout_s=TIMEOUT_S)
        due_at = self.started_at + self._period_s * number / len(self._threads)
        for place in range(number, 2**62, len(self._threads)):
            if self._over.wait(max(0.0, due_at - time.perf_counter())):
                break
            due_at = max(due_at + self._period_s, time.perf_counter() - self._period_s)
            body, expected = self._requests[place % len(self._requests)]
            began_at = time.perf_counter()
            try:
                reply = connection.exchange(body)
                count(reply, expected, time.perf_counter() - began_at, counts)
                keeps = b"\r\nconnection: close" not in reply.head.lower()
            except OSError as error:
                counts.failed[type(error).__name__] += 1
                keeps = False
            if not keeps:
                connection = self._reopened(connection)
        connection.close()

    def _reopened(self, connection: Connection) -> Connection:
        connection.close()
        while not self._over.is_set():
            try:
                return Connection(self._port, timeout_s=TIMEOUT_S)
            except ConnectionError:
                self._over.wait(0.05)
        return connection


def requests_of(
    vectors: Mapping[str, NDArray[np.float32]], texts: int, prefix: str = ""
) -> Sequence[tuple[bytes, NDArray[np.float32]]]:
    """Return requests of some texts each, with their vectors [texts, width]."""
    names = list(vectors)
    requests = []
    for begin in range(len(names)):
        chosen = [names[(begin + step) % len(names)] for step in range(texts)]
        body: Any = {"input": chosen}
        requests.append((post(prefix + ROUTE, msgspec.json.encode(body)), np.stack([vectors[name] for name in chosen])))
    return requests


def count(reply: Reply, expected: NDArray[np.float32], seconds: float, counts: Counts) -> None:
    """Count one answer."""
    if reply.status == 429 and b"\r\nretry-after: " in reply.head.lower():
        counts.rejected += 1
    elif reply.status != 200:
        counts.failed[str(reply.status)] += 1
    else:
        rows = np.array([row.embedding for row in msgspec.json.decode(reply.body, type=_Body).data], np.float32)
        if rows.shape == expected.shape and np.abs(rows - expected).max() < TOLERANCE:
            counts.answers += 1
            counts.times_s.append(seconds)
        else:
            counts.wrong += 1
