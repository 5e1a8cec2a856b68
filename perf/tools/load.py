"""Closed-loop load generator and health probe, each for a process of its own."""

from __future__ import annotations

import heapq
import math
import selectors
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Final

from perf.tools.client import Connection, get, retry_after_s, successful
from perf.tools.workers import worker

PROBE_TIMEOUT_S: Final = 10.0
"""Timeout of a health check in seconds, as an orchestrator may have."""

PROBE_EVERY_S: Final = 0.02

FAILED_PAUSE_S: Final = 1.0
"""Pause after another answer than 200 and 429, as after a 429 without `Retry-After`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Closed loop: each client sends its next request after the answer to the last one."""

    clients: int
    seconds: float = math.inf
    """Time after which no request is sent."""
    max_requests: int | None = None
    """Total number of requests. None: only `seconds` ends the load."""
    patience_s: float = 0.0
    """Time to wait for missing answers after `seconds`."""
    pause_s: float = 0.0
    """Pause of a client between an answer and its next request."""
    heeds_429: bool = True
    """Pause after a 429 for its `Retry-After`. False: send the next request at once, as a bad client does."""
    strict: bool = True
    """Raise on an answer that is neither 200 nor 429, or on none. False: count it as failed."""


BURST: Final = Load(clients=64, seconds=3.0, patience_s=10.0)
"""Warm-up load: as many requests at once as under overload, so that the largest batches have allocated their memory."""


@dataclass(slots=True)
class LoadOutcome:
    """Outcome of a load."""

    latencies_ms: list[float] = field(default_factory=list)
    """Latencies of the requests answered with 200."""
    rejected: int = 0
    """Answers with 429."""
    failed: int = 0
    """Other answers, and connections that the server closed or did not read from; 0 for a strict load."""
    unanswered: int = 0
    """Requests without an answer at the end; their connections were closed."""
    elapsed_s: float = 0.0
    """Time from the first request to the last answer.

    If answers are missing, it ends with `patience_s`.
    """
    client_cpu_s: float = 0.0

    @property
    def rate(self) -> float:
        """Requests a second that were answered with 200."""
        return len(self.latencies_ms) / self.elapsed_s


class LoadGenerator:
    """Generator of closed-loop load, in one thread; it keeps its connections between loads.

    After a 429, a client waits for its `Retry-After`, unless the load says otherwise.

    Args:
        port: Port of the server.
        requests: Complete requests, which are sent in turn.
    """

    def __init__(self, port: int, requests: tuple[bytes, ...]) -> None:
        self._port = port
        self._requests = cycle(requests)
        self._kept: list[Connection] = []

    def __call__(self, load: Load) -> LoadOutcome:
        """Run one load to its end.

        Raises:
            RuntimeError: An answer's status is neither 200 nor 429, and the load is strict.
            OSError: The server closed a connection or did not read from it, and the load is strict.
        """
        while len(self._kept) < load.clients:
            self._kept.append(Connection(self._port, timeout_s=PROBE_TIMEOUT_S))
        cpu_before_s = time.process_time()
        with selectors.DefaultSelector() as selector:
            loop = _ClosedLoop(load, self._requests, selector, self._kept[: load.clients])
            outcome = loop.run()
        outcome.client_cpu_s = time.process_time() - cpu_before_s
        for connection in loop.sent_at:
            connection.close()
            self._kept.remove(connection)
        return outcome

    def close(self) -> None:
        """Close all connections."""
        for connection in self._kept:
            connection.close()


def closed_loop_rate(port: int, requests: tuple[bytes, ...], load: Load) -> float:
    """Measure the rate of a load after a burst, from a process of its own."""
    with worker(partial(LoadGenerator, port, requests)) as generate:
        generate(BURST)
        return generate(load).rate


class _ClosedLoop:
    """Clients of one load while it runs."""

    def __init__(
        self, load: Load, requests: Iterator[bytes], selector: selectors.BaseSelector, clients: list[Connection]
    ) -> None:
        self._requests = requests
        self._selector = selector
        self._strict = load.strict
        self._heeds_429 = load.heeds_429
        self._pause_s = load.pause_s
        self._sends_left = math.inf if load.max_requests is None else load.max_requests
        self._started = time.perf_counter()
        self._last_send = self._started + load.seconds
        self._end = self._last_send + load.patience_s
        self._resting: list[tuple[float, int, Connection]] = [
            (self._started, place, connection) for place, connection in enumerate(clients)
        ]
        """A heap of the time at which a client sends, its number, and its connection."""
        self._places = {connection: place for place, connection in enumerate(clients)}
        self.sent_at: dict[Connection, float] = {}
        """Send times of the clients that wait for an answer."""
        self._outcome = LoadOutcome()
        for connection in clients:
            selector.register(connection.socket, selectors.EVENT_READ, connection)

    def run(self) -> LoadOutcome:
        outcome = self._outcome
        ended = self._started
        while (now := self._send_due()) < self._end and (self.sent_at or self._resting):
            wake = min(self._end, self._resting[0][0] if self._resting else math.inf)
            for key, _ in self._selector.select(None if wake == math.inf else max(0.0, wake - now)):
                connection: Connection = key.data
                try:
                    reply = connection.receive()
                except ConnectionError as error:
                    self._lose(connection, error)
                    continue
                if reply is None:
                    continue
                ended = time.perf_counter()
                latency_s = ended - self.sent_at.pop(connection)
                pause_s = retry_after_s(reply)
                if pause_s is not None:
                    outcome.rejected += 1
                    if not self._heeds_429:
                        pause_s = None
                elif reply.status == 200 or self._strict:
                    successful(reply)
                    outcome.latencies_ms.append(latency_s * 1e3)
                else:
                    outcome.failed += 1
                    pause_s = FAILED_PAUSE_S
                again_at = ended + max(pause_s or 0.0, self._pause_s)
                heapq.heappush(self._resting, (again_at, self._places[connection], connection))
        outcome.unanswered = len(self.sent_at)
        outcome.elapsed_s = (self._end if self.sent_at else ended) - self._started
        return outcome

    def _send_due(self) -> float:
        """Send the requests that are due, and remove clients that may not send any more; return the time."""
        while self._resting:
            now = time.perf_counter()
            due, _, connection = self._resting[0]
            if max(due, now) >= self._last_send or self._sends_left <= 0:
                heapq.heappop(self._resting)
            elif due <= now:
                heapq.heappop(self._resting)
                self._sends_left -= 1
                self.sent_at[connection] = now
                try:
                    connection.send(next(self._requests))
                except (ConnectionError, TimeoutError) as error:
                    self._lose(connection, error)
            else:
                break
        return time.perf_counter()

    def _lose(self, connection: Connection, error: OSError) -> None:
        """Handle a connection that the server has closed, or does not read from."""
        if self._strict:
            raise error
        self._selector.unregister(connection.socket)
        connection.reopen()
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        if self.sent_at.pop(connection, None) is not None:
            self._outcome.failed += 1
            again_at = time.perf_counter() + FAILED_PAUSE_S
            heapq.heappush(self._resting, (again_at, self._places[connection], connection))


@dataclass(slots=True)
class ProbeOutcome:
    """Outcome of health checks; a timeout counts with the time that it waited."""

    latencies_ms: list[float] = field(default_factory=list)
    timeouts: int = 0

    def add(self, other: ProbeOutcome) -> None:
        self.latencies_ms += other.latencies_ms
        self.timeouts += other.timeouts


class HealthProbe:
    """Probe with about 50 health checks a second on one connection, one at a time.

    A server that hangs gets fewer checks, so that its share of slow answers is understated, never overstated.

    Args:
        port: Port of the server.
        path: Path of the health check.
    """

    def __init__(self, port: int, path: str = "/health") -> None:
        self._port = port
        self._path = path

    def __call__(self, seconds: float) -> ProbeOutcome:
        """Probe for this time."""
        outcome = ProbeOutcome()
        request = get(self._path)
        connection = Connection(self._port, timeout_s=PROBE_TIMEOUT_S)
        end = time.perf_counter() + seconds
        while (sent_at := time.perf_counter()) < end:
            try:
                successful(connection.exchange(request))
            except TimeoutError:
                outcome.timeouts += 1
                connection.close()
                connection = Connection(self._port, timeout_s=PROBE_TIMEOUT_S)
            latency_s = time.perf_counter() - sent_at
            outcome.latencies_ms.append(latency_s * 1e3)
            time.sleep(max(0.0, PROBE_EVERY_S - latency_s))
        connection.close()
        return outcome
