"""Throughput of HTTP/1.1 and the stages alone, with a mock model that computes nothing."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import psutil

from perf.tools import report
from perf.tools.client import post
from perf.tools.load import HealthProbe, Load, LoadGenerator, LoadOutcome, ProbeOutcome
from perf.tools.report import number
from perf.tools.servers import Backend, Server, serving
from perf.tools.texts import embeddings_body
from perf.tools.workers import Worker, pinned, worker

CLIENTS: Final = (1, 16, 64, 256)
BESIDE: Final = 64
"""Connections of the load with health checks, and of the load that is rejected."""
FORWARD_S: Final = 0.1
"""Seconds of a forward for the load that is rejected: one request runs, and all others find the server full."""
WARM_UP_S: Final = 0.5
PATIENCE_S: Final = 10.0

AIM: Final = 5000.0
"""Requests a second."""
PUBLISHED: Final = (
    "published for vLLM with a mock engine, on other machines: 4,015 with its Rust front, 807 with Python"
)

COLUMNS: Final = (
    "connections", "a second", "least .. most", "p50 ms", "p99", "max", "server's core", "us each", "load's core",
    "rejected", "health p50", "p99", "n",
)  # fmt: skip
NOTE: Final = (
    "a second: answers of any status, the median of the rounds; p50 to max: of answers with 200; cores: how much of "
    "the time they ran; us each: CPU time of the server for one answer; /health in ms"
)


@dataclass(slots=True)
class Cell:
    """One load, in all rounds."""

    name: str
    clients: int
    probed: bool = False
    """`/health` is asked meanwhile."""
    loads: list[LoadOutcome] = field(default_factory=list)
    server_s: list[float] = field(default_factory=list)
    """CPU time of the server in each round, in seconds."""
    health: ProbeOutcome = field(default_factory=ProbeOutcome)

    @property
    def answers(self) -> int:
        """Answers of any status."""
        return sum(len(load.latencies_ms) + load.rejected for load in self.loads)

    @property
    def rejected(self) -> float:
        """The share of answers with 429."""
        return sum(load.rejected for load in self.loads) / max(1, self.answers)

    @property
    def rates(self) -> list[float]:
        """Answers a second of each round."""
        return [(len(load.latencies_ms) + load.rejected) / load.elapsed_s for load in self.loads]

    @property
    def rate(self) -> float:
        """Answers a second, the median of the rounds."""
        return statistics.median(self.rates)

    def result(self) -> dict[str, object]:
        """The figures for the JSON file."""
        elapsed_s = sum(load.elapsed_s for load in self.loads)
        return {
            "clients": self.clients,
            "answers_per_s": self.rates,
            "answered_ms": report.Summary.of(self._latencies_ms()),
            "rejected": self.rejected,
            "unanswered": sum(load.unanswered for load in self.loads),
            "server_cores": sum(self.server_s) / elapsed_s,
            "server_us_each": self._server_us(),
            "load_cores": sum(load.client_cpu_s for load in self.loads) / elapsed_s,
            "health_ms": report.Summary.of(self.health.latencies_ms),
            "health_timeouts": self.health.timeouts,
        }

    def row(self) -> list[str]:
        """The cells of a row with `COLUMNS`."""
        elapsed_s = sum(load.elapsed_s for load in self.loads)
        health = report.Summary.cells(report.Summary.of(self.health.latencies_ms))
        return [
            self.name,
            number(self.rate),
            f"{number(min(self.rates))} .. {number(max(self.rates))}",
            *report.Summary.cells(report.Summary.of(self._latencies_ms()))[:3],
            f"{sum(self.server_s) / elapsed_s:.0%}",
            number(self._server_us()),
            f"{sum(load.client_cpu_s for load in self.loads) / elapsed_s:.0%}",
            f"{self.rejected:.1%}",
            *(health[0], health[1], health[3]),
        ]

    def _latencies_ms(self) -> list[float]:
        return [ms for load in self.loads for ms in load.latencies_ms]

    def _server_us(self) -> float:
        return 1e6 * sum(self.server_s) / max(1, self.answers)


def run(backend: Backend, *, rounds: int, seconds: float) -> None:
    """Measure, print and record: each round has every load once, in alternating order.

    The server runs on the first core that this process may use, load and probe on the last one.
    """
    cores = sorted(os.sched_getaffinity(0))
    settings = {"backend": backend, "rounds": rounds, "seconds": seconds, "clients": CLIENTS,
                "server_core": cores[0], "load_core": cores[-1]}  # fmt: skip
    with report.recording("front", settings) as record:
        cells = measure(backend, rounds=rounds, seconds=seconds)
        record.results |= {cell.name: cell.result() for cell in cells.values()}
        title = "One text of 12 words over HTTP/1.1, a model that computes nothing, the server on one core"
        if len(cores) == 1:
            title += ", which the load shares"
        report.show_table(title, COLUMNS, [cell.row() for cell in cells.values()], NOTE)
        record.show_target(
            f"requests a second of {BESIDE} connections", cells[str(BESIDE)].rate, AIM, "", at_least=True
        )
        report.console.print(PUBLISHED)


def measure(
    backend: Backend, *, rounds: int, seconds: float, clients: tuple[int, ...] = CLIENTS, beside: int = BESIDE
) -> Mapping[str, Cell]:
    """Run every load in every round; return the cells by the names of the loads.

    Args:
        backend: Event loop of the servers.
        rounds: Number of rounds.
        seconds: Length of one load.
        clients: Connections of the loads.
        beside: Connections of the load with health checks, and of the load that is rejected.
    """
    accepted = [Cell(str(count), count) for count in clients]
    accepted.append(Cell(f"{beside}, probed", beside, probed=True))
    rejected = Cell(f"{beside}, full", beside)
    with ExitStack() as running:
        quick = running.enter_context(serving(mock_command(backend)))
        full = running.enter_context(serving(mock_command(backend, "--max-requests", "1", "--forward", str(FORWARD_S))))
        parts = []
        for server, own in ((quick, accepted), (full, [rejected])):
            server.card()
            generate = running.enter_context(worker(partial(pinned, partial(LoadGenerator, server.port, requests()))))
            probe = running.enter_context(worker(partial(pinned, partial(HealthProbe, server.port))))
            parts += [(server, generate, probe, cell) for cell in own]
        with report.progress("front", rounds * len(parts)) as bar:
            for round_number in range(rounds):
                for server, generate, probe, cell in parts[:: -1 if round_number % 2 else 1]:
                    _measure(server, generate, probe, cell, seconds)
                    bar.advance(bar.task_ids[0])
    return {cell.name: cell for cell in (*accepted, rejected)}


def mock_command(backend: Backend, *more: str) -> list[str]:
    """Return the command of a server with a mock model, without the port."""
    return [sys.executable, "-m", "perf.cost.mock", "--backend", backend, *more]


def requests() -> tuple[bytes, ...]:
    """Return different requests of one text of 12 words each."""
    texts = (f"one short text of twelve words for the front of server {place}" for place in range(256))
    return tuple(post("/v1/embeddings", embeddings_body([text])) for text in texts)


def _measure(
    server: Server,
    generate: Worker[Load, LoadOutcome],
    probe: Worker[float, ProbeOutcome],
    cell: Cell,
    seconds: float,
) -> None:
    generate(Load(clients=cell.clients, seconds=min(WARM_UP_S, seconds), patience_s=PATIENCE_S, heeds_429=False))
    before_s = cpu_s(server)
    generate.begin(Load(clients=cell.clients, seconds=seconds, patience_s=PATIENCE_S, heeds_429=False))
    if cell.probed:
        cell.health.add(probe(seconds))
    cell.loads.append(generate.end())
    cell.server_s.append(cpu_s(server) - before_s)


def cpu_s(server: Server) -> float:
    """Return the CPU time of a server so far, in seconds."""
    times = psutil.Process(server.process.pid).cpu_times()
    return float(times.user + times.system)
