"""A load and health checks at the same time, and how the two are reported together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from perf import report
from perf.load import Load, LoadOutcome, ProbeOutcome
from perf.workers import Worker

COLUMNS: Final = (
    "texts/s", "request p50", "p99", "max", "n", "refused", "unanswered", "health p50", "p99", "max", "n", "time-outs",
)  # fmt: skip
NOTE: Final = "requests and health checks in ms; of fewer than 100 samples, p99 is the largest"


@dataclass(slots=True)
class Flood:
    """What was seen of one server under one kind of load, over one or more rounds."""

    texts_per_request: int
    health: ProbeOutcome = field(default_factory=ProbeOutcome)
    loads: list[LoadOutcome] = field(default_factory=list)

    def run(self, generate: Worker[Load, LoadOutcome], probe: Worker[float, ProbeOutcome], load: Load) -> None:
        """One round: a load, and health checks while its clients send."""
        generate.begin(load)
        self.health.add(probe(load.seconds))
        self.loads.append(generate.end())

    def result(self) -> dict[str, object]:
        """For the JSON file."""
        return {
            "texts_per_s": self._texts_per_s(),
            "request_ms": report.Summary.of(self._latencies_ms()),
            "refused_requests": self._refused(),
            "unanswered_requests": self._unanswered(),
            "health_ms": report.Summary.of(self.health.latencies_ms),
            "health_timeouts": self.health.timeouts,
            "load_generator_cores": sum(load.client_cpu_s for load in self.loads) / self._elapsed_s(),
        }

    def row(self) -> list[str]:
        """For a table with `COLUMNS`."""
        requests, health = report.Summary.of(self._latencies_ms()), report.Summary.of(self.health.latencies_ms)
        return [
            report.number(self._texts_per_s()),
            *report.Summary.cells(requests),
            str(self._refused()),
            str(self._unanswered()),
            *report.Summary.cells(health),
            str(self.health.timeouts),
        ]

    def _latencies_ms(self) -> list[float]:
        return [ms for load in self.loads for ms in load.latencies_ms]

    def _refused(self) -> int:
        return sum(load.refused for load in self.loads)

    def _unanswered(self) -> int:
        return sum(load.unanswered + load.failed for load in self.loads)

    def _elapsed_s(self) -> float:
        return sum(load.elapsed_s for load in self.loads)

    def _texts_per_s(self) -> float:
        return len(self._latencies_ms()) * self.texts_per_request / self._elapsed_s()
