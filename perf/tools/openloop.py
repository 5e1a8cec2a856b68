"""Open-loop load: requests arrive at random times, whatever the server does; then recovery probes."""

from __future__ import annotations

import math
import random
import select
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Final

from perf.tools.client import Connection, Reply, retry_after_s

RECOVERY_PAUSE_S: Final = 0.01
"""Pause between two probes after a load, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Requests at random times, independent of each other and of the answers.

    Their number is fixed, `rate` times `seconds`, and their times are uniform. This is a Poisson process given its
    count, so that the rates of two levels have exactly the ratio they should have.
    """

    rate: float
    """Requests per second."""
    seconds: float
    seed: int
    timeout_s: float
    """Time after which a client closes its connection."""
    max_connections: int
    """Maximum requests in flight; further ones are counted as `not_sent`."""
    recovered_ms: float | None = None
    """Latency of a probe that counts as recovered. None: send no probes after the last arrival."""
    give_up_s: float = 30.0
    """Maximum time of probing after the last arrival."""


@dataclass(slots=True)
class ArrivalsOutcome:
    """Outcome of the requests; times count from when a request was due, not from when it was sent."""

    offered: int = 0
    """Requests that were due."""
    accepted_ms: list[float] = field(default_factory=list)
    """Latencies of answers with 200."""
    rejected_ms: list[float] = field(default_factory=list)
    """Latencies of answers with 429."""
    retry_after_s: list[float] = field(default_factory=list)
    """`Retry-After` of the rejections."""
    other_statuses: dict[int, int] = field(default_factory=dict)
    timeouts: int = 0
    broken: int = 0
    """Connections that the server closed or rejected instead of answering."""
    not_sent: int = 0
    """Requests that exceeded `max_connections`."""
    late_ms: list[float] = field(default_factory=list)
    """Delay of the client: from when a request was due to when it was sent; part of all times above."""
    accepted_s: float = 0.0
    """Time from the start of the load to its end, or to a later 200."""
    recovered_s: float | None = None
    """Time from the end of the load to the first recovered probe; None if there was none."""
    connections: int = 0
    client_cpu_s: float = 0.0

    @property
    def goodput(self) -> float:
        """Requests answered with 200 per second."""
        return len(self.accepted_ms) / self.accepted_s

    def add(self, other: ArrivalsOutcome) -> None:
        """Add the outcome of another round of the same load."""
        self.offered += other.offered
        self.accepted_ms += other.accepted_ms
        self.rejected_ms += other.rejected_ms
        self.retry_after_s += other.retry_after_s
        self.other_statuses = dict(Counter(self.other_statuses) + Counter(other.other_statuses))
        self.timeouts += other.timeouts
        self.broken += other.broken
        self.not_sent += other.not_sent
        self.late_ms += other.late_ms
        self.accepted_s += other.accepted_s
        recovered = (self.recovered_s, other.recovered_s)
        self.recovered_s = None if None in recovered else max(filter(None, recovered), default=0.0)
        self.connections = max(self.connections, other.connections)
        self.client_cpu_s += other.client_cpu_s


class OpenLoop:
    """Generator of open-loop load, in one thread, with as many connections as needed.

    A rejected request is not retried. Connections are kept between loads.

    Args:
        port: Port of the server.
        requests: Complete requests, which are sent in turn.
    """

    def __init__(self, port: int, requests: tuple[bytes, ...]) -> None:
        self._port = port
        self._requests = cycle(requests)
        self._idle: list[Connection] = []

    def __call__(self, arrivals: Arrivals) -> ArrivalsOutcome:
        """Run one load, then probes, until every request has its answer or timeout."""
        cpu_before_s = time.process_time()
        with select.epoll() as answers:
            outcome = _Run(arrivals, self._requests, answers, self._idle, self._port).run()
        outcome.client_cpu_s = time.process_time() - cpu_before_s
        return outcome

    def close(self) -> None:
        """Close the connections."""
        while self._idle:
            self._idle.pop().close()


@dataclass(slots=True, eq=False)
class _Sent:
    """A request that waits for its answer."""

    connection: Connection
    due: float
    sent: float
    probe: bool
    done: bool = False


class _Run:
    """One load while it runs."""

    def __init__(
        self,
        arrivals: Arrivals,
        requests: Iterator[bytes],
        answers: select.epoll,
        idle: list[Connection],
        port: int,
    ) -> None:
        rng = random.Random(arrivals.seed)
        self._arrivals = arrivals
        self._requests = requests
        self._answers = answers
        self._idle = idle
        self._port = port
        self._open: dict[int, Connection] = {}
        """Open connections by their file descriptors."""
        for connection in idle:
            self._look_out_for(connection)
        self._outcome = ArrivalsOutcome(offered=round(arrivals.rate * arrivals.seconds))
        times = sorted(rng.uniform(0.0, arrivals.seconds) for _ in range(self._outcome.offered))
        self._started = time.perf_counter()
        self._due = deque(self._started + at for at in times)
        self._load_end = self._started + arrivals.seconds
        self._waiting: dict[Connection, _Sent] = {}
        self._by_age: deque[_Sent] = deque()
        """Waiting requests, the oldest first; those that are done are skipped later."""
        self._last_accepted = self._load_end
        self._probe_due = math.inf if arrivals.recovered_ms is None else self._load_end

    def run(self) -> ArrivalsOutcome:
        outcome = self._outcome
        while self._due or self._waiting or self._probe_due < math.inf:
            now = time.perf_counter()
            self._send_due(now)
            wake = min(self._due[0] if self._due else math.inf, self._probe_due, self._drop_late(now))
            for descriptor, _ in self._answers.poll(None if wake == math.inf else max(0.0, wake - time.perf_counter())):
                self._read(self._open[descriptor])
            outcome.connections = max(outcome.connections, len(self._open))
        outcome.accepted_s = self._last_accepted - self._started
        return outcome

    def _send_due(self, now: float) -> None:
        while self._due and self._due[0] <= now:
            self._send(self._due.popleft(), probe=False)
        if self._probe_due <= now:
            due, self._probe_due = self._probe_due, math.inf
            if now < self._load_end + self._arrivals.give_up_s:
                self._send(max(due, self._load_end), probe=True)

    def _send(self, due: float, *, probe: bool) -> None:
        if not self._idle and len(self._waiting) >= self._arrivals.max_connections:
            if probe:
                self._probe_due = time.perf_counter() + RECOVERY_PAUSE_S
            else:
                self._outcome.not_sent += 1
            return
        connection: Connection | None = None
        try:
            connection = self._idle.pop() if self._idle else self._connect()
            connection.send(next(self._requests))
        except OSError:
            if connection is not None:
                self._forget(connection)
            if probe:
                self._probe_due = time.perf_counter() + RECOVERY_PAUSE_S
            else:
                self._outcome.broken += 1
            return
        now = time.perf_counter()
        if not probe:
            self._outcome.late_ms.append((now - due) * 1e3)
        self._waiting[connection] = sent = _Sent(connection, due, now, probe)
        self._by_age.append(sent)

    def _connect(self) -> Connection:
        connection = Connection(self._port, timeout_s=self._arrivals.timeout_s)
        connection.socket.settimeout(None)  # epoll says when to read, so no read needs a timeout
        self._look_out_for(connection)
        return connection

    def _look_out_for(self, connection: Connection) -> None:
        self._open[connection.socket.fileno()] = connection
        self._answers.register(connection.socket, select.EPOLLIN)

    def _drop_late(self, now: float) -> float:
        """Drop requests past their timeout; return the time of the next timeout."""
        while self._by_age:
            oldest = self._by_age[0]
            late_at = oldest.sent + self._arrivals.timeout_s
            if not oldest.done and late_at > now:
                return late_at
            self._by_age.popleft()
            if not oldest.done:
                self._outcome.timeouts += not oldest.probe
                self._forget(oldest.connection)
        return math.inf

    def _read(self, connection: Connection) -> None:
        try:
            reply = connection.receive()
        except OSError:
            sent = self._waiting.get(connection)
            self._outcome.broken += sent is not None and not sent.probe
            self._forget(connection)
            return
        if reply is None:
            return
        sent = self._waiting.pop(connection)
        sent.done = True
        self._idle.append(connection)
        self._count(sent, reply, time.perf_counter())

    def _count(self, sent: _Sent, reply: Reply, now: float) -> None:
        outcome, took_ms = self._outcome, (now - sent.due) * 1e3
        if sent.probe:
            if reply.status == 200 and self._is_quick(took_ms):
                outcome.recovered_s = now - self._load_end
            else:
                self._probe_due = now + RECOVERY_PAUSE_S
        elif reply.status == 200:
            outcome.accepted_ms.append(took_ms)
            self._last_accepted = max(self._last_accepted, now)
        elif (pause_s := retry_after_s(reply)) is not None:
            outcome.rejected_ms.append(took_ms)
            outcome.retry_after_s.append(pause_s)
        else:
            outcome.other_statuses[reply.status] = outcome.other_statuses.get(reply.status, 0) + 1

    def _is_quick(self, took_ms: float) -> bool:
        return self._arrivals.recovered_ms is not None and took_ms <= self._arrivals.recovered_ms

    def _forget(self, connection: Connection) -> None:
        """Close a connection; a probe that waited on it is sent again on another one."""
        sent = self._waiting.pop(connection, None)
        if sent is not None:
            sent.done = True
            if sent.probe:
                self._probe_due = time.perf_counter() + RECOVERY_PAUSE_S
        elif connection in self._idle:
            self._idle.remove(connection)
        del self._open[connection.socket.fileno()]
        self._answers.unregister(connection.socket)
        connection.close()
