"""Deaths of the processes of one server under load: kills of fronts and of the engine process, and SIGTERM."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import numpy as np
import psutil
from numpy.typing import NDArray

from perf.tools import report
from perf.tools.checked_load import CheckedLoad
from perf.tools.client import Connection, get
from perf.tools.known_vectors import known_vectors
from perf.tools.servers import Options, Server, family, serving

Vectors = Mapping[str, NDArray[np.float32]]

CLIENTS: Final = 8
TIMEOUT_S: Final = 60.0
STEADY: Final = 50
"""Answers after which a load counts as steady."""

TOLD_S: Final = 1.0
"""Limit of the time in which each client must learn of a death."""

BACK_S: Final = 10.0
"""Limit of the time in which the server must serve again."""


def run(options: Options, *, kills: int, terms: int) -> None:
    """Measure, print and record.

    Args:
        options: Options of the server.
        kills: Kills of a front, and as many of the engine process.
        terms: Servers that are ended by SIGTERM under load.
    """
    command = [*options.serve_command(), "--api-servers", "2", "--drain-lead", "0.5", "--no-access-log"]
    vectors = known_vectors(options.engine_config())
    settings = {"options": options, "kills": kills, "terms": terms, "clients": CLIENTS}
    with report.recording("deaths", settings) as record:
        rows = []
        found: dict[str, tuple[float, float]] = {}
        wrong: dict[str, int] = {}
        with serving(command) as server:
            record.results["model"] = server.card()
            for name in ("front", "engine"):
                worst = [_kill(server, vectors, name) for _ in range(kills)]
                told_s, back_s = found[name] = max(each[0] for each in worst), max(each[1] for each in worst)
                closed, wrong[name] = sum(each[2] for each in worst), sum(each[3] for each in worst)
                record.results[name] = {"told_s": told_s, "back_s": back_s, "closed": closed, "wrong": wrong[name]}
                rows.append([f"SIGKILL of {name}, {kills} times", f"{told_s:.2f}", f"{back_s:.2f}", str(closed)])
        lost = sum(_term(command, vectors) for _ in range(terms))
        record.results["terms"] = {"lost": lost}
        rows.append([f"SIGTERM, {terms} times", "", "", str(lost)])
        note = "told: longest wait of a request that was under way; back: all clients are answered again"
        report.show_table("Deaths", ("", "told s", "back s", "closed without an answer"), rows, note)
        for name, (told_s, back_s) in found.items():
            record.show_target(f"told of the death of {name}", told_s, TOLD_S, "s")
            record.show_target(f"back after the death of {name}", back_s, BACK_S, "s")
            record.show_target(f"wrong vectors around the death of {name}", wrong[name], 0, "")
        record.show_target("requests lost by SIGTERM", lost, 0, "")


def _kill(server: Server, vectors: Vectors, role: str) -> tuple[float, float, int, int]:
    """Kill one process under load.

    Returns:
        The longest time until a request under way ended, the time until all clients were served again, the
        connections that closed without an answer, and the wrong vectors.
    """
    with CheckedLoad(server.port, vectors, clients=CLIENTS) as load:
        _wait_for(load, STEADY)
        _child(server, role).kill()
        killed_at = time.perf_counter()
        _wait_ready(server)
        _wait_for(load, STEADY * CLIENTS)
    under_way = [each for each in load.exchanges if each.sent_at <= killed_at < each.ended_at]
    told_s = max((each.ended_at - killed_at for each in under_way), default=0.0)
    bad = [each.ended_at for each in load.exchanges if each.ended_at > killed_at and each.status != 200]
    closed = sum(each.status is None for each in load.exchanges)
    return told_s, max(bad, default=killed_at) - killed_at, closed, load.counts.wrong


def _term(command: Sequence[str], vectors: Vectors) -> int:
    """End a server by SIGTERM under load; return the requests that were sent and got no answer."""
    with serving(command) as server:
        server.card()
        with CheckedLoad(server.port, vectors, clients=CLIENTS) as load:
            _wait_for(load, STEADY)
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(TIMEOUT_S)
    if code != 0:
        raise RuntimeError(f"the server ended with code {code}")
    return sum(each.status is None for each in load.exchanges)


def _wait_for(load: CheckedLoad, answers: int) -> None:
    """Wait for further right answers."""
    wanted = load.answers + answers
    latest = time.monotonic() + TIMEOUT_S
    while load.answers < wanted:
        if time.monotonic() > latest:
            raise RuntimeError("the server does not serve again")
        time.sleep(0.005)


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
