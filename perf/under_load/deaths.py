"""Deaths of the processes of one server under load: kills of fronts and of the engine process, and SIGTERM."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import psutil

from perf.tools import report
from perf.tools.client import Connection, get
from perf.tools.servers import Options, Server, family, serving
from perf.tools.texts import TextSource

CLIENTS: Final = 8
TIMEOUT_S: Final = 60.0
STEADY: Final = 50
"""Answers after which a load counts as steady."""

TOLD_S: Final = 1.0
"""Limit of the time in which each client must learn of a death."""

BACK_S: Final = 10.0
"""Limit of the time in which the server must serve again."""


@dataclass(slots=True)
class _Exchange:
    """One request."""

    sent_at: float
    ended_at: float
    status: int | None
    """None: its connection ended without an answer."""


@dataclass(slots=True)
class _Clients:
    """Clients of a closed loop, which note each exchange. A connection that says so is not used again."""

    port: int
    requests: Sequence[bytes]
    exchanges: list[_Exchange] = field(default_factory=list)
    refused: int = 0
    """Attempts to connect that nobody took: no request was sent."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        self._threads = [threading.Thread(target=self._send, args=(number,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()
        self.wait_for(STEADY)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, answers: int) -> None:
        """Wait for further answers with 200."""
        wanted = self._answered() + answers
        latest = time.monotonic() + TIMEOUT_S
        while self._answered() < wanted:
            if time.monotonic() > latest:
                raise RuntimeError("the server does not serve again")
            time.sleep(0.005)

    def _answered(self) -> int:
        return sum(exchange.status == 200 for exchange in list(self.exchanges))

    def _send(self, number: int) -> None:
        connection: Connection | None = None
        place = number
        while not self._stop.is_set():
            if connection is None:
                try:
                    connection = Connection(self.port, timeout_s=TIMEOUT_S)
                except OSError:
                    self.refused += 1
                    time.sleep(0.01)
                    continue
            sent_at, status, closes = time.monotonic(), None, True
            with suppress(OSError):
                reply = connection.exchange(self.requests[place % len(self.requests)])
                status, closes = reply.status, b"connection: close" in reply.head.lower()
            place += 1
            self.exchanges.append(_Exchange(sent_at, time.monotonic(), status))
            if closes:
                connection.close()
                connection = None
        if connection is not None:
            connection.close()


def run(options: Options, *, kills: int, terms: int) -> None:
    """Measure, print and record.

    Args:
        options: Options of the server.
        kills: Kills of a front, and as many of the engine process.
        terms: Servers that are ended by SIGTERM under load.
    """
    command = [*options.serve_command(), "--api-servers", "2", "--drain-lead", "0.5", "--no-access-log"]
    requests = TextSource(options.model).workload("s1").requests
    settings = {"options": options, "kills": kills, "terms": terms, "clients": CLIENTS}
    with report.recording("deaths", settings) as record:
        rows = []
        found: dict[str, tuple[float, float]] = {}
        with serving(command) as server:
            record.results["model"] = server.card()
            for name in ("front", "engine"):
                worst = [_kill(server, requests, name) for _ in range(kills)]
                told_s, back_s = found[name] = max(each[0] for each in worst), max(each[1] for each in worst)
                closed = sum(each[2] for each in worst)
                record.results[name] = {"told_s": told_s, "back_s": back_s, "closed": closed}
                rows.append([f"SIGKILL of {name}, {kills} times", f"{told_s:.2f}", f"{back_s:.2f}", str(closed)])
        lost = sum(_term(command, requests) for _ in range(terms))
        record.results["terms"] = {"lost": lost}
        rows.append([f"SIGTERM, {terms} times", "", "", str(lost)])
        note = "told: longest wait of a request that was under way; back: all clients are answered again"
        report.show_table("Deaths", ("", "told s", "back s", "closed without an answer"), rows, note)
        for name, (told_s, back_s) in found.items():
            record.show_target(f"told of the death of {name}", told_s, TOLD_S, "s")
            record.show_target(f"back after the death of {name}", back_s, BACK_S, "s")
        record.show_target("requests lost by SIGTERM", lost, 0, "")


def _kill(server: Server, requests: Sequence[bytes], role: str) -> tuple[float, float, int]:
    """Kill one process under load.

    Returns:
        The longest time until a request under way ended, the time until all clients were served again, and the
        connections that closed without an answer.
    """
    clients = _Clients(server.port, requests)
    clients.start()
    _child(server, role).kill()
    killed_at = time.monotonic()
    _wait_ready(server)
    clients.wait_for(STEADY * CLIENTS)
    clients.stop()
    under_way = [each for each in clients.exchanges if each.sent_at <= killed_at < each.ended_at]
    told_s = max((each.ended_at - killed_at for each in under_way), default=0.0)
    bad = [each.ended_at for each in clients.exchanges if each.ended_at > killed_at and each.status != 200]
    closed = sum(each.status is None for each in clients.exchanges)
    return told_s, max(bad, default=killed_at) - killed_at, closed


def _term(command: Sequence[str], requests: Sequence[bytes]) -> int:
    """End a server by SIGTERM under load; return the requests that were sent and got no answer."""
    with serving(command) as server:
        server.card()
        clients = _Clients(server.port, requests)
        clients.start()
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(TIMEOUT_S)
        clients.stop()
    if code != 0:
        raise RuntimeError(f"the server ended with code {code}")
    return sum(each.status is None for each in clients.exchanges)


def _child(server: Server, role: str) -> psutil.Process:
    """Return a process of a role: the engine process has the weights, and so the most memory."""
    children = family(server.process.pid)[1:]
    engine = max(children, key=lambda child: child.memory_info().rss)
    return engine if role == "engine" else next(child for child in children if child != engine)


def _wait_ready(server: Server) -> None:
    latest = time.monotonic() + TIMEOUT_S
    while time.monotonic() < latest:
        with suppress(OSError):
            connection = Connection(server.port, timeout_s=TIMEOUT_S)
            try:
                if connection.exchange(get("/ready")).status == 200:
                    return
            finally:
                connection.close()
        time.sleep(0.02)
    raise RuntimeError("the server is not ready again")
