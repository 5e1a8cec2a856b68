"""Load of requests whose right vectors are known: each answer is compared with them."""

from __future__ import annotations

import base64
import random
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
TOLERANCE: Final = 1e-3
"""Largest difference of a number from the known one; batches of other sizes round in other ways."""
TIMEOUT_S: Final = 60.0
"""Limit for an answer, and for a new connection after one that has ended."""
NOTES_KEPT: Final = 20
_RETRY_S: Final = 0.02


class _Row(msgspec.Struct):
    embedding: str


class _Body(msgspec.Struct):
    data: list[_Row]


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """A request, and the vectors [texts, width] that are its right answer."""

    content: bytes
    vectors: NDArray[np.float32]

    def is_answered_by(self, reply: Reply) -> bool:
        """Return True if an answer with 200 has the right vectors, and nothing else."""
        rows = msgspec.json.decode(reply.body, type=_Body).data
        given = [np.frombuffer(base64.b64decode(row.embedding), np.float32) for row in rows]
        return len(given) == len(self.vectors) and all(
            one.shape == right.shape and bool(np.abs(one - right).max() < TOLERANCE)
            for one, right in zip(given, self.vectors, strict=True)
        )


def requests_of(
    vectors: Mapping[str, NDArray[np.float32]], texts: int = 1, prefix: str = "", model: str | None = None
) -> Sequence[KnownRequest]:
    """Return requests of some texts each, which begin at each text in turn.

    Args:
        vectors: Texts with their vectors, which differ by much more than `TOLERANCE`.
        texts: Texts of one request.
        prefix: Path below which the server is.
        model: Name of the model in the requests. None: they name none.
    """
    names = list(vectors)
    requests = []
    for begin in range(len(names)):
        chosen = [names[(begin + step) % len(names)] for step in range(texts)]
        body: Any = {"input": chosen, "encoding_format": "base64", **({} if model is None else {"model": model})}
        content = post(prefix + ROUTE, msgspec.json.encode(body))
        requests.append(KnownRequest(content, np.stack([vectors[name] for name in chosen])))
    return requests


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request, with times of `time.perf_counter`."""

    due_at: float
    sent_at: float
    ended_at: float
    status: int | None
    """None: its connection ended without an answer."""
    is_right: bool
    """Status 200, with the right vectors."""
    note: str
    """The error of the connection, or an answer that is not 200."""
    may_retry: bool
    """Status 429 and `Retry-After`."""


@dataclass(slots=True)
class Counts:
    """Outcomes of requests."""

    answers: int = 0
    """Answers with the right vectors."""
    wrong: int = 0
    """Answers with status 200 and another vector."""
    rejected: int = 0
    """Answers with status 429 and `Retry-After`."""
    failed: Counter[str] = field(default_factory=Counter)
    """Other outcomes: the status, or the name of the error of a connection."""
    times_s: list[float] = field(default_factory=list)
    """Time of each right answer, from when its request was due."""

    @classmethod
    def of(cls, exchanges: Sequence[Exchange]) -> Counts:
        """Count exchanges."""
        counts = cls()
        for each in exchanges:
            if each.is_right:
                counts.answers += 1
                counts.times_s.append(each.ended_at - each.due_at)
            elif each.status == 200:
                counts.wrong += 1
            elif each.may_retry:
                counts.rejected += 1
            else:
                counts.failed[each.note.partition(":")[0] if each.status is None else str(each.status)] += 1
        return counts

    @property
    def asked(self) -> int:
        """All requests."""
        return self.answers + self.wrong + self.rejected + sum(self.failed.values())


class CheckedLoad:
    """Clients with a connection and a thread each, for the length of a block.

    No failure is retried here. A client whose connection has ended opens another one. Requests are due at random times
    of a rate. A pause of the server makes later ones late, since each client has one request under way, and their time
    counts from when they were due.

    Args:
        port: Port of the server on 127.0.0.1.
        vectors: Texts with their vectors, which differ by much more than `TOLERANCE`.
        clients: Number of clients, and most requests at once.
        rate: Requests a second of all clients together. None: each sends its next one at once.
        texts: Texts of one request.
        prefix: Path below which the server is.
        model: Name of the model in the requests. None: they name none.
        least: Requests to send before the end of the block at least.

    Raises:
        RuntimeError: At the end of the block, if a client failed: nobody took its connection for `TIMEOUT_S`, or from
            the beginning.
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
        model: str | None = None,
        least: int = 0,
    ) -> None:
        self._port = port
        self._requests = requests_of(vectors, texts, prefix, model)
        self._rate = rate
        self._least = least
        self._lock = threading.Lock()
        self._chance = random.Random(1)
        self._sent = 0
        self._due_at = self._started_at = 0.0
        self._may_end = threading.Event()
        self._exchanges: list[Exchange] = []
        self.answers = 0
        """Answers with the right vectors so far."""
        self._threads = [threading.Thread(target=self._client, name=f"client {number}") for number in range(clients)]
        self._error: BaseException | None = None
        self.seconds = 0.0
        """Length of the block and of the last answers."""

    def __enter__(self) -> Self:
        self._started_at = self._due_at = time.perf_counter()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._least = 0
        self._may_end.set()
        for thread in self._threads:
            thread.join()
        self.seconds = time.perf_counter() - self._started_at
        if self._error is not None and kind is None:
            raise RuntimeError("a client failed") from self._error

    @property
    def sent(self) -> int:
        """Requests that were sent."""
        return self._sent

    @property
    def exchanges(self) -> Sequence[Exchange]:
        """All exchanges so far, in the order of their ends."""
        return tuple(self._exchanges)

    @property
    def counts(self) -> Counts:
        """The counts so far."""
        return Counts.of(self.exchanges)

    def notes(self) -> list[str]:
        """Return the first failures: seconds since the start, and what happened."""
        failed = (each for each in self.exchanges if each.status != 200)
        return [
            f"{each.ended_at - self._started_at:.2f} s: {each.note}"
            for each, _ in zip(failed, range(NOTES_KEPT), strict=False)
        ]

    def _next(self) -> tuple[KnownRequest, float] | None:
        """Return the next request, and the time at which it is due; None at the end."""
        with self._lock:
            if self._is_over():
                return None
            request = self._requests[self._sent % len(self._requests)]
            self._sent += 1
            if self._rate is None:
                return request, time.perf_counter()
            self._due_at += self._chance.expovariate(self._rate)
            return request, self._due_at

    def _is_over(self) -> bool:
        return self._error is not None or (self._sent >= self._least and self._may_end.is_set())

    def _client(self) -> None:
        try:
            connection: Connection | None = Connection(self._port, timeout_s=TIMEOUT_S)
            while connection is not None and (turn := self._next()) is not None:
                request, due_at = turn
                if (early_s := due_at - time.perf_counter()) > 0:
                    time.sleep(early_s)
                keeps = self._ask(connection, request, due_at)
                if not keeps:
                    connection.close()
                    connection = self._connect()
            if connection is not None:
                connection.close()
        except BaseException as error:  # noqa: BLE001  # the end of the block raises it
            self._error = error

    def _ask(self, connection: Connection, request: KnownRequest, due_at: float) -> bool:
        """Send one request and note its outcome; return False if the connection cannot be used again."""
        sent_at = time.perf_counter()
        try:
            reply = connection.exchange(request.content)
        except OSError as error:
            self._note(due_at, sent_at, None, note=f"{type(error).__name__}: {error}")
            return False
        head = reply.head.lower()
        self._note(
            due_at,
            sent_at,
            reply.status,
            is_right=reply.status == 200 and request.is_answered_by(reply),
            note="" if reply.status == 200 else f"{reply.status} {reply.body[:120]!r}",
            may_retry=reply.status == 429 and b"\r\nretry-after: " in head,
        )
        return b"\r\nconnection: close" not in head

    def _note(
        self,
        due_at: float,
        sent_at: float,
        status: int | None,
        *,
        note: str,
        is_right: bool = False,
        may_retry: bool = False,
    ) -> None:
        exchange = Exchange(due_at, sent_at, time.perf_counter(), status, is_right, note, may_retry)
        with self._lock:
            self._exchanges.append(exchange)
            self.answers += is_right

    def _connect(self) -> Connection | None:
        """Open another connection, as soon as somebody takes it; None at the end."""
        latest = time.perf_counter() + TIMEOUT_S
        while True:
            try:
                return Connection(self._port, timeout_s=TIMEOUT_S)
            except OSError:
                if self._is_over():
                    return None
                if time.perf_counter() > latest:
                    raise
                time.sleep(_RETRY_S)
