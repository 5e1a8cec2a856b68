"""Cost of traces: throughput of a mock model with traces off, for one request in a hundred, and for all."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Final

from perf.cost.front import cpu_s, mock_command, requests
from perf.tools import report
from perf.tools.load import Load, LoadGenerator
from perf.tools.report import number
from perf.tools.servers import Backend, serving
from perf.tools.workers import pinned, worker

RATIOS: Final[Mapping[str, float | None]] = {"off": None, "off, again": None, "0.01": 0.01, "1.0": 1.0}
"""Ratio of each server; None: traces are off. The second one without traces shows what the machine itself changes."""
CLIENTS: Final = 64
WARM_UP_S: Final = 0.5
PATIENCE_S: Final = 10.0
AIM: Final = 0.97
"""Throughput with the usual ratio, as a part of that without traces."""

COLUMNS: Final = (
    "traces", "requests a second", "least .. most", "of that without", "least .. most", "us each", "of that without",
)  # fmt: skip


@dataclass(slots=True)
class Rates:
    """Figures of one server, by round."""

    each: list[float] = field(default_factory=list)
    """Requests a second."""
    cpu_us: list[float] = field(default_factory=list)
    """CPU time of the server for one request, in microseconds. Other load on the machine changes it less."""

    def against(self, base: Rates) -> list[float]:
        """Return the part of another server's rate, in each round."""
        return [mine / theirs for mine, theirs in zip(self.each, base.each, strict=True)]

    def cpu_against(self, base: Rates) -> list[float]:
        """Return the part of another server's CPU time, in each round."""
        return [mine / theirs for mine, theirs in zip(self.cpu_us, base.cpu_us, strict=True)]


def run(backend: Backend, *, rounds: int, seconds: float) -> None:
    """Measure, print and record: each round has every server once, in alternating order.

    All servers run on the first core that this process may use, load and collector on the last one. Parts of the rate
    without traces are of one round each, so that a busy machine weighs on both.
    """
    settings = {"backend": backend, "rounds": rounds, "seconds": seconds, "clients": CLIENTS}
    with report.recording("traces", settings) as record:
        rates = measure(backend, rounds=rounds, seconds=seconds)
        rows = []
        for name, found in rates.items():
            parts = found.against(rates["off"])
            cpu_parts = found.cpu_against(rates["off"])
            record.results[name] = {
                "per_s": found.each, "of_off": parts, "cpu_us": found.cpu_us, "cpu_of_off": cpu_parts,
            }  # fmt: skip
            rows.append([
                name,
                number(statistics.median(found.each)),
                f"{number(min(found.each))} .. {number(max(found.each))}",
                f"{statistics.median(parts):.3f}",
                f"{min(parts):.3f} .. {max(parts):.3f}",
                number(statistics.median(found.cpu_us)),
                f"{statistics.median(cpu_parts):.3f}",
            ])  # fmt: skip
        report.show_table(
            f"One text of 12 words over HTTP/1.1, {CLIENTS} clients, a model that computes nothing, one core",
            COLUMNS,
            rows,
            "medians of the rounds; us each: CPU time of the server for one request",
        )
        usual = statistics.median(rates["0.01"].against(rates["off"]))
        record.show_target("throughput at ratio 0.01, of that without", usual, AIM, "", at_least=True)


def measure(backend: Backend, *, rounds: int, seconds: float) -> Mapping[str, Rates]:
    """Load every server in every round; return the rates by the names of the servers."""
    rates = {name: Rates() for name in RATIOS}
    with ExitStack() as running:
        url = running.enter_context(collector())
        generators = []
        for name, ratio in RATIOS.items():
            flags = () if ratio is None else ("--trace-endpoint", url, "--trace-ratio", str(ratio))
            server = running.enter_context(serving(mock_command(backend, *flags)))
            server.card()
            generate = running.enter_context(worker(partial(pinned, partial(LoadGenerator, server.port, requests()))))
            generators.append((name, server, generate))
        with report.progress("traces", rounds * len(RATIOS)) as bar:
            for round_number in range(rounds):
                for name, server, generate in generators[:: -1 if round_number % 2 else 1]:
                    generate(Load(clients=CLIENTS, seconds=min(WARM_UP_S, seconds), patience_s=PATIENCE_S))
                    before_s = cpu_s(server)
                    outcome = generate(Load(clients=CLIENTS, seconds=seconds, patience_s=PATIENCE_S))
                    rates[name].each.append(outcome.rate)
                    rates[name].cpu_us.append(1e6 * (cpu_s(server) - before_s) / len(outcome.latencies_ms))
                    bar.advance(bar.task_ids[0])
    return rates


@contextmanager
def collector() -> Iterator[str]:
    """Run a collector in a process of its own, which drops all spans. Yields its URL."""
    context = get_context("spawn")
    mine, other = context.Pipe()
    process = context.Process(target=_collect, args=(other,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{mine.recv()}"
    finally:
        process.terminate()
        process.join()


class _Drops(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _collect(answer: Connection[Any, Any]) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with ThreadingHTTPServer(("127.0.0.1", 0), _Drops) as server:
        answer.send(server.server_port)
        server.serve_forever()
