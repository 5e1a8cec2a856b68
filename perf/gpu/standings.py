"""Figures of several servers by load, the ratios of ours to theirs, and the targets."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from perf.tools import report
from perf.tools.load import LoadOutcome
from perf.tools.report import Record, Summary, number

COLUMNS: Final = ("load, clients: server", "texts/s", "p50 (ms)", "p99 (ms)", "rounds", "ours / it")


@dataclass(frozen=True, slots=True)
class Cell:
    """One load with one number of clients."""

    load: str
    clients: int

    def __str__(self) -> str:
        return f"{self.load}, {self.clients}"


@dataclass(slots=True)
class Figures:
    """Figures of one server in one cell, over all rounds."""

    texts_per_s: list[float] = field(default_factory=list)
    """Rate of each round."""
    latencies_ms: list[float] = field(default_factory=list)
    rejected: int = 0
    """Answers with 429, after which the client came again."""

    def add(self, outcome: LoadOutcome, texts_per_request: int) -> None:
        """Add a round.

        Raises:
            RuntimeError: A request failed or was not answered, so the rate means nothing.
        """
        missing = outcome.failed + outcome.unanswered
        if missing or not outcome.latencies_ms:
            raise RuntimeError(f"{missing} requests failed, {len(outcome.latencies_ms)} were answered")
        self.texts_per_s.append(outcome.rate * texts_per_request)
        self.latencies_ms += outcome.latencies_ms
        self.rejected += outcome.rejected

    @property
    def rate(self) -> float:
        """Median texts a second of the rounds."""
        return statistics.median(self.texts_per_s)


@dataclass(slots=True)
class Standings:
    """Figures and failures of all servers with one model."""

    ours: str
    """Name of our server."""
    cells: dict[tuple[Cell, str], Figures] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Reasons by server, or by server and cell."""
    cosines: dict[str, float] = field(default_factory=dict)
    """Lowest cosine of the vectors of each server with ours."""

    def figures(self, cell: Cell, server: str) -> Figures:
        """Return the figures of one server in one cell, to which rounds are added."""
        return self.cells.setdefault((cell, server), Figures())

    def ratio(self, cell: Cell, server: str) -> float | None:
        """Return our rate by that of a server; None: one of them has none."""
        ours, theirs = (self.cells.get((cell, name), Figures()) for name in (self.ours, server))
        return ours.rate / theirs.rate if ours.texts_per_s and theirs.texts_per_s else None

    def least_ratio(self, cell: Cell, kind: str) -> float | None:
        """Return our rate by that of the fastest server whose name begins with `kind`; None: there is none."""
        servers = [server for place, server in self.cells if place == cell and server.startswith(kind)]
        ratios = [self.ratio(cell, server) for server in servers]
        return min((ratio for ratio in ratios if ratio is not None), default=None)

    def rows(self) -> list[list[str]]:
        """Return the rows of the table, by cell; then the failures with their reasons."""
        rows = []
        for (cell, server), figures in sorted(self.cells.items(), key=lambda item: self._cells().index(item[0][0])):
            if figures.texts_per_s:
                p50, p99, *_ = Summary.cells(Summary.of(figures.latencies_ms))
                ratio = self.ratio(cell, server)
                shown = "-" if ratio is None or server == self.ours else f"{ratio:.2f}"
                rounds = str(len(figures.texts_per_s))
                rows.append([f"{cell}: {server}", number(figures.rate), p50, p99, rounds, shown])
        return rows + [[f"{what}: {_shortened(why)}", "-", "-", "-", "0", "-"] for what, why in self.failures.items()]

    def show(self, title: str) -> None:
        report.show_table(title, COLUMNS, self.rows())

    def keep_targets(self, record: Record, model: str, kinds: Mapping[str, str]) -> None:
        """Record a target for each cell and kind of server: at least its rate.

        Args:
            record: Record of the results.
            model: Name of the model.
            kinds: Shown name by the beginning of the servers' names.
        """
        for cell in self._cells():
            for kind, shown in kinds.items():
                if (ratio := self.least_ratio(cell, kind)) is not None:
                    record.keep_target(f"{model}, {cell} clients: ahead of {shown}", ratio, 1.0, "", at_least=True)

    def as_json(self) -> dict[str, object]:
        """Return the figures for the JSON file."""
        cells: Sequence[dict[str, object]] = [
            {
                "load": cell.load,
                "clients": cell.clients,
                "server": server,
                "texts_per_s": figures.texts_per_s,
                "ms": Summary.of(figures.latencies_ms),
                "rejected": figures.rejected,
                "ours_by_it": self.ratio(cell, server),
            }
            for (cell, server), figures in self.cells.items()
        ]
        return {"cells": cells, "failures": self.failures, "cosines": self.cosines}

    def _cells(self) -> list[Cell]:
        """Return the cells in the order in which they were measured."""
        return list(dict.fromkeys(cell for cell, _ in self.cells))


def _shortened(reason: str) -> str:
    """Return the first line of a reason, and the last one with the error."""
    lines = [line.strip() for line in reason.strip().splitlines()] or ["no reason"]
    return " ".join(dict.fromkeys((lines[0], lines[-1][-160:])))
