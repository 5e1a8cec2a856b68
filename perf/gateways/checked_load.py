"""Load at a fixed rate, in which every answer is checked: its status, and its vector."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

from perf.gateways.texts import KnownText
from perf.tools.client import Connection

CLIENTS: Final = 32
"""Connections, and most requests at once."""
TIMEOUT_S: Final = 60.0
FAILURES_KEPT: Final = 20


@dataclass(slots=True)
class Tally:
    """Answers of one load."""

    statuses: Counter[int] = field(default_factory=Counter)
    broken: int = 0
    """Requests whose connection ended without an answer."""
    wrong: int = 0
    """Answers with 200 and a wrong vector."""
    latencies_ms: list[float] = field(default_factory=list)
    """Latencies of answers with 200, from the time at which the request was due."""
    failures: list[str] = field(default_factory=list)
    """The first failures: seconds since the start, and what happened."""
    seconds: float = 0.0

    @property
    def requests(self) -> int:
        return self.statuses.total() + self.broken

    @property
    def failed(self) -> int:
        """Requests without an answer with 200."""
        return self.requests - self.statuses[200]

    @property
    def rate(self) -> float:
        """Answers with 200 a second."""
        return self.statuses[200] / self.seconds


class CheckedLoad:
    """Clients that send distinct texts through one port, and check what comes back.

    No failure is retried here: retries are the gateway's. Requests are due at random times of a rate. At most `CLIENTS`
    are under way, so a pause of the servers makes later ones late, and their latency counts from when they were due.

    Args:
        port: Port of the gateway.
        texts: Texts with their right vectors, sent in turn.
        rate: Requests a second. Infinite: each client sends its next request at once.
        least: Requests to send at least.
    """

    def __init__(self, port: int, texts: Sequence[KnownText], *, rate: float, least: int) -> None:
        self._port = port
        self._texts = texts
        self._rate = rate
        self._least = least
        self._lock = threading.Lock()
        self._rng = random.Random(least)
        self._sent = 0
        self._due = self._started = 0.0
        self._may_end = threading.Event()
        self._threads = [threading.Thread(target=self._client, name=f"client {number}") for number in range(CLIENTS)]
        self._error: BaseException | None = None
        self.tally = Tally()

    @property
    def sent(self) -> int:
        """Requests that were sent."""
        return self._sent

    def start(self) -> None:
        """Start the clients."""
        self._started = self._due = time.perf_counter()
        for thread in self._threads:
            thread.start()

    def finish(self) -> Tally:
        """Let the load end once enough requests are sent, and wait for all answers.

        Raises:
            RuntimeError: A client failed.
        """
        self._may_end.set()
        for thread in self._threads:
            thread.join()
        self.tally.seconds = time.perf_counter() - self._started
        if self._error is not None:
            raise RuntimeError("a client failed") from self._error
        return self.tally

    def _next(self) -> tuple[KnownText, float] | None:
        """Return the next text, and the time at which it is due; None at the end."""
        with self._lock:
            if self._error is not None or (self._sent >= self._least and self._may_end.is_set()):
                return None
            text = self._texts[self._sent % len(self._texts)]
            self._sent += 1
            if self._rate == math.inf:
                return text, time.perf_counter()
            self._due += self._rng.expovariate(self._rate)
            return text, self._due

    def _client(self) -> None:
        try:
            with closing(Connection(self._port, timeout_s=TIMEOUT_S)) as connection:
                while (turn := self._next()) is not None:
                    text, due = turn
                    if (early_s := due - time.perf_counter()) > 0:
                        time.sleep(early_s)
                    if not self._ask(connection, text, due):
                        connection.reopen()
        except BaseException as error:  # noqa: BLE001  # `finish` raises it
            self._error = error

    def _ask(self, connection: Connection, text: KnownText, due: float) -> bool:
        """Send one request and count its answer; return False if the connection cannot be used again."""
        try:
            reply = connection.exchange(text.request)
        except OSError as error:
            with self._lock:
                self.tally.broken += 1
                self._note(f"no answer: {error!r}")
            return False
        latency_ms = (time.perf_counter() - due) * 1e3
        is_right = reply.status != 200 or text.is_answered_by(reply)
        with self._lock:
            self.tally.statuses[reply.status] += 1
            if reply.status == 200:
                self.tally.latencies_ms.append(latency_ms)
                self.tally.wrong += not is_right
            else:
                self._note(f"{reply.status} {reply.body[:120]!r}")
        return b"connection: close" not in reply.head.lower()

    def _note(self, what: str) -> None:
        if len(self.tally.failures) < FAILURES_KEPT:
            self.tally.failures.append(f"{time.perf_counter() - self._started:.2f} s: {what}")
