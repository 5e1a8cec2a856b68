"""Results over several rounds: medians, and ratios to ours of the same round, with their spreads."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from perf.peers.catalogue import Peer
from perf.peers.environments import OURS
from perf.peers.inputs import SCENARIOS, Scenario
from perf.peers.visits import MIX, MIXED_LOAD, Cell, Level, Visit
from perf.tools import report
from perf.tools.report import number
from staged_pool.runtime.config import DType

CLOSED: Final = (
    "server, clients", "per second", "of ours", "cores", "request p50 ms", "p99",
    "health p50 ms", "p99", "time-outs", "rejected", "failed", "unanswered",
)  # fmt: skip
OPEN: Final = (
    "server, load", "offered/s", "200/s", "of capacity", "200 p50 ms", "p99", "429", "time-outs",
    "other", "health p50 ms", "p99", "quick again after s",
)  # fmt: skip
WEIGHT: Final = (
    "server", "version", "weights", "start s", "processes", "RSS MB", "PSS MB", "least cosine", "others' cores, most",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Contender:
    """Server with weights of one data type, and its visits round by round."""

    peer: Peer
    dtype: DType
    version: str
    visits: Sequence[Visit | None]
    """Visit of each round; None: it was not measured."""

    @property
    def name(self) -> str:
        return f"{self.peer.name} ({self.dtype})"

    def rates(self, scenario: Scenario, clients: int) -> list[float | None]:
        """Return the rate of each round; None: it was not measured."""
        cells = [visit.cells.get((scenario, clients)) if visit else None for visit in self.visits]
        return [cell.rate(scenario) if cell else None for cell in cells]

    def seen(self) -> list[Visit]:
        """Return the visits of the rounds in which it was measured."""
        return [visit for visit in self.visits if visit is not None]

    def result(self) -> dict[str, object]:
        """Return the figures for the JSON file."""
        return {
            "server": self.peer.name,
            "version": self.version,
            "dtype": self.dtype,
            "settings": self.peer.settings,
            "rounds": [None if visit is None else _visit_result(visit) for visit in self.visits],
        }


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of one figure over the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Return the spread of values; None if there is no value."""
        known = [value for value in values if value is not None]
        return cls(statistics.median(known), min(known), max(known)) if known else None

    @staticmethod
    def cell(spread: Spread | None) -> str:
        """Return the cell of a table: the median, with the minimum and the maximum in brackets if they differ."""
        if spread is None:
            return "-"
        if spread.least == spread.most:
            return number(spread.median)
        return f"{number(spread.median)} ({number(spread.least)} .. {number(spread.most)})"


@dataclass(frozen=True, slots=True)
class Table:
    """Table to print, and to write as Markdown."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    note: str = ""

    def show(self) -> None:
        report.show_table(self.title, self.columns, self.rows, self.note)

    def markdown(self) -> str:
        lines = report.markdown_table(self.columns, self.rows)
        return f"### {self.title}\n\n{lines}" + (f"\n{self.note}\n" if self.note else "")


def ratios(theirs: Sequence[float | None], ours: Sequence[float | None]) -> list[float | None]:
    """Return the ratio of each round, in which the machine's noise affects both; None: one is missing."""
    return [a / b if a is not None and b else None for a, b in zip(theirs, ours, strict=True)]


def tables(contenders: Sequence[Contender], clients: Mapping[Scenario, tuple[int, ...]], title: str) -> Iterator[Table]:
    """Yield all tables of a comparison; ours must be among the contenders."""
    ours = next(contender for contender in contenders if contender.peer.name == OURS)
    for scenario, described in SCENARIOS.items():
        rows = [
            _closed_row(contender, ours, scenario, count)
            for count in clients[scenario]
            for contender in contenders
            if any(rate is not None for rate in contender.rates(scenario, count))
        ]
        if rows:
            yield Table(f"{title}: {described} a request, closed loop", CLOSED, rows)
    levels = sorted({factor for contender in contenders for visit in contender.seen() for factor in visit.levels})
    rows = [
        _open_row(f"{contender.peer.name}, {factor:g}x", found)
        for factor in levels
        for contender in contenders
        if (found := [visit.levels[factor] for visit in contender.seen() if factor in visit.levels])
    ]
    if rows:
        note = "load: times the most that this server did in the closed loop of the same round"
        yield Table(f"{title}: {SCENARIOS['s1']} a request, open loop", OPEN, rows, note)
    rows = [
        _open_row(f"{contender.peer.name}, {kind}", found)
        for kind in MIX
        for contender in contenders
        if (found := [visit.mixed[kind] for visit in contender.seen() if kind in visit.mixed])
    ]
    if rows:
        shares = " and ".join(f"{share:.0%} {SCENARIOS[kind]}" for kind, share in MIX.items())
        note = f"{shares}; together {MIXED_LOAD:g} of what this server can do, by the closed loops of the same round"
        yield Table(f"{title}: texts and images at once, open loop", OPEN, rows, note)
    rows = [_weight_row(contender) for contender in contenders if contender.seen()]
    yield Table(
        f"{title}: the servers", WEIGHT, rows, "memory after the closed loops; what processes share is once in PSS"
    )


def failures(contender: Contender) -> Iterator[str]:
    """Yield the failed measurements with their reasons, without duplicates."""
    known: set[str] = set()
    for visit in contender.seen():
        for what, why in visit.failures.items():
            line = f"{contender.name}, {what}: {why}"
            if line not in known:
                known.add(line)
                yield line


def _closed_row(contender: Contender, ours: Contender, scenario: Scenario, clients: int) -> list[str]:
    rates = contender.rates(scenario, clients)
    cells = [cell for visit in contender.seen() if (cell := visit.cells.get((scenario, clients)))]
    loads, probes = [cell.load for cell in cells], [cell.health for cell in cells]
    health = report.Summary.of([ms for probe in probes for ms in probe.latencies_ms])
    return [
        f"{contender.peer.name}, {clients}",
        Spread.cell(Spread.of(rates)),
        Spread.cell(Spread.of(ratios(rates, ours.rates(scenario, clients)))),
        f"{statistics.median(cell.cores.server for cell in cells):.2f}",
        *report.Summary.cells(report.Summary.of([ms for load in loads for ms in load.latencies_ms]))[:2],
        *report.Summary.cells(health)[:2],
        str(sum(probe.timeouts for probe in probes)),
        str(sum(load.rejected for load in loads)),
        str(sum(load.failed for load in loads)),
        str(sum(load.unanswered for load in loads)),
    ]


def _open_row(name: str, levels: Sequence[Level]) -> list[str]:
    """Return the row of a load over all rounds."""
    outcomes, probes = [level.outcome for level in levels], [level.health for level in levels]
    accepted = report.Summary.of([ms for outcome in outcomes for ms in outcome.accepted_ms])
    health = report.Summary.of([ms for probe in probes for ms in probe.latencies_ms])
    recovered = [outcome.recovered_s for outcome in outcomes if outcome.recovered_s is not None]
    return [
        name,
        number(statistics.median(level.offered_per_s for level in levels)),
        number(statistics.median(outcome.goodput for outcome in outcomes)),
        Spread.cell(Spread.of([level.outcome.goodput / level.capacity_per_s for level in levels])),
        *report.Summary.cells(accepted)[:2],
        str(sum(len(outcome.rejected_ms) for outcome in outcomes)),
        str(sum(outcome.timeouts for outcome in outcomes)),
        str(sum(o.broken + o.not_sent + sum(o.other_statuses.values()) for o in outcomes)),
        *report.Summary.cells(health)[:2],
        f"{max(recovered):.2f}" if len(recovered) == len(outcomes) else "never",
    ]


def _weight_row(contender: Contender) -> list[str]:
    visits = contender.seen()
    others = [cell.cores.others for visit in visits for cell in visit.cells.values()]
    return [
        contender.peer.name,
        contender.version,
        contender.dtype,
        f"{statistics.median(visit.start_s for visit in visits):.1f}",
        str(max(visit.processes for visit in visits)),
        f"{statistics.median(visit.rss_mb for visit in visits):.0f}",
        f"{statistics.median(visit.pss_mb for visit in visits):.0f}",
        f"{min(visit.least_cosine for visit in visits):.4f}",
        f"{max(others, default=0.0):.2f}",
    ]


def _visit_result(visit: Visit) -> dict[str, object]:
    return {
        "start_s": visit.start_s,
        "least_cosine": visit.least_cosine,
        "cells": [
            {"scenario": scenario, "clients": clients, **_cell_result(cell, scenario)}
            for (scenario, clients), cell in visit.cells.items()
        ],
        "levels": [{"factor": factor, **_level_result(level)} for factor, level in visit.levels.items()],
        "mixed": [{"kind": kind, **_level_result(level)} for kind, level in visit.mixed.items()],
        "failures": visit.failures,
        "processes": visit.processes,
        "rss_mb": visit.rss_mb,
        "pss_mb": visit.pss_mb,
    }


def _cell_result(cell: Cell, scenario: Scenario) -> dict[str, object]:
    load = cell.load
    return {
        "per_s": cell.rate(scenario),
        "request_ms": report.Summary.of(load.latencies_ms),
        "rejected": load.rejected,
        "failed": load.failed,
        "unanswered": load.unanswered,
        "client_cores": load.client_cpu_s / load.elapsed_s,
        "health_ms": report.Summary.of(cell.health.latencies_ms),
        "health_timeouts": cell.health.timeouts,
        "cores": asdict(cell.cores),
    }


def _level_result(level: Level) -> dict[str, object]:
    outcome = asdict(level.outcome)
    for name in ("accepted_ms", "rejected_ms", "retry_after_s", "late_ms"):
        outcome[name] = report.Summary.of(outcome[name])
    return {
        "offered_per_s": level.offered_per_s,
        "capacity_per_s": level.capacity_per_s,
        **outcome,
        "goodput_per_s": level.outcome.goodput,
        "health_ms": report.Summary.of(level.health.latencies_ms),
        "health_timeouts": level.health.timeouts,
        "cores": asdict(level.cores),
    }
