"""Load and health checks at the same time, with a common report."""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass, field
from typing import Final

from perf.tools import report
from perf.tools.client import Connection, post, successful
from perf.tools.load import Load, LoadOutcome, ProbeOutcome
from perf.tools.servers import Options, serving
from perf.tools.workers import Worker

COLUMNS: Final = (
    "texts/s", "request p50", "p99", "max", "n", "rejected", "unanswered", "health p50", "p99", "max", "n", "time-outs",
)  # fmt: skip
NOTE: Final = "requests and health checks in ms; of fewer than 100 samples, p99 is the largest"


@dataclass(slots=True)
class Flood:
    """Outcomes of one server under one kind of load, over one or more rounds."""

    texts_per_request: int
    health: ProbeOutcome = field(default_factory=ProbeOutcome)
    loads: list[LoadOutcome] = field(default_factory=list)

    def run(self, generate: Worker[Load, LoadOutcome], probe: Worker[float, ProbeOutcome], load: Load) -> None:
        """Run one round: a load, with health checks while its clients send."""
        generate.begin(load)
        self.health.add(probe(load.seconds))
        self.loads.append(generate.end())

    def result(self) -> dict[str, object]:
        """Return the figures for the JSON file."""
        return {
            "texts_per_s": self._texts_per_s(),
            "request_ms": report.Summary.of(self._latencies_ms()),
            "rejected_requests": self._rejected(),
            "unanswered_requests": self._unanswered(),
            "health_ms": report.Summary.of(self.health.latencies_ms),
            "health_timeouts": self.health.timeouts,
            "load_generator_cores": sum(load.client_cpu_s for load in self.loads) / self._elapsed_s(),
        }

    def row(self) -> list[str]:
        """Return the cells of a row with `COLUMNS`."""
        requests, health = report.Summary.of(self._latencies_ms()), report.Summary.of(self.health.latencies_ms)
        return [
            report.number(self._texts_per_s()),
            *report.Summary.cells(requests),
            str(self._rejected()),
            str(self._unanswered()),
            *report.Summary.cells(health),
            str(self.health.timeouts),
        ]

    def _latencies_ms(self) -> list[float]:
        return [ms for load in self.loads for ms in load.latencies_ms]

    def _rejected(self) -> int:
        return sum(load.rejected for load in self.loads)

    def _unanswered(self) -> int:
        return sum(load.unanswered + load.failed for load in self.loads)

    def _elapsed_s(self) -> float:
        return sum(load.elapsed_s for load in self.loads)

    def _texts_per_s(self) -> float:
        return len(self._latencies_ms()) * self.texts_per_request / self._elapsed_s()


SILENT_CLIENTS: Final = 200
SILENT_HEAD: Final = post("/v1/embeddings", b"")[:-5] + b"1000000\r\n\r\n"
"""Head of a request with a body of 1 MB."""
BODY: Final = post("/v1/embeddings", b'{"input":"a"' + b" " * 2**20 + b"}")
"""Request with a body of 1 MB that costs little to decode and to compute."""
TIMEOUT_S: Final = 60.0
AIM: Final = 2.0
"""Target ratio of the time of a body beside silent uploads to that alone."""


def silent_uploads(options: Options, *, calls: int) -> None:
    """Measure the time of a body of 1 MB, alone and beside silent uploads.

    A silent client announces such a body, and sends nine bytes of it.

    Args:
        options: Options of the server.
        calls: Bodies that are sent one after the other, in each case.
    """
    settings = {"options": options, "calls": calls, "clients": SILENT_CLIENTS}
    with (
        report.recording("uploads", settings) as record,
        serving(options.serve_command()) as server,
        contextlib.ExitStack() as stack,
    ):
        record.results["model"] = server.card()
        client = stack.enter_context(contextlib.closing(Connection(server.port, timeout_s=TIMEOUT_S)))
        times_ms = {"alone": _bodies_ms(client, calls)}
        for _ in range(SILENT_CLIENTS):
            silent = stack.enter_context(contextlib.closing(Connection(server.port, timeout_s=TIMEOUT_S)))
            silent.send(SILENT_HEAD + b'{"input":')
        times_ms["beside them"] = _bodies_ms(client, calls)
        rows = [[name, *report.Summary.cells(report.Summary.of(times))] for name, times in times_ms.items()]
        report.show_table("A body of 1 MB", ("", "p50 ms", "p99", "max", "n"), rows)
        ratio = statistics.median(times_ms["beside them"]) / statistics.median(times_ms["alone"])
        record.show_target(f"beside {SILENT_CLIENTS} silent uploads", ratio, AIM, "times as long")


def _bodies_ms(client: Connection, calls: int) -> list[float]:
    times_ms = []
    for _ in range(calls + 1):
        began = time.perf_counter()
        successful(client.exchange(BODY))
        times_ms.append((time.perf_counter() - began) * 1e3)
    return times_ms[1:]
