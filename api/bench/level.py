"""One level of load: its warm-up and its rounds, as one load without a pause, and its numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import anyio
import numpy as np
from numpy.typing import NDArray

from staged_pool.api.bench.arrivals import arrival_times
from staged_pool.api.bench.connection import Connection
from staged_pool.api.bench.load import Generator, Limits
from staged_pool.api.bench.records import NOT_SENT, OK, REJECTED, UNFINISHED, WORDS, Columns, Records
from staged_pool.api.bench.sizes import KINDS
from staged_pool.api.bench.statistics import LEAST_SAMPLES, Spread, latency_report, quantile, rounded
from staged_pool.api.bench.workload import Maker

LATE_S: Final = 0.010
"""Lateness, in seconds, from which a generator may spoil a measurement."""

LATE_SHARE: Final = 0.1
"""Share of the median latency from which it does."""

LEAST_WINDOW_S: Final = 0.5
"""Shortest part of a round, in seconds, that counts if the user ends the load."""


BOOTSTRAP_SEED: Final = 1
"""Seed of the bootstrap: one report has one interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Load of a level."""

    rate: float | None = None
    """Requests a second of an open loop."""
    clients: int | None = None
    """Clients of a closed loop."""
    burstiness: float = 1.0
    warmup_s: float = 5.0
    round_s: float = 10.0
    rounds: int = 3
    slo_s: float | None = None
    """Latency within which an answer counts as good; None: any."""
    times: Sequence[float] | None = None
    """Times of an open loop, in place of a rate: those of a trace."""

    @property
    def seconds(self) -> float:
        """Length of the whole load."""
        return self.warmup_s + self.rounds * self.round_s

    @property
    def is_open(self) -> bool:
        """True if requests come whatever the server does."""
        return self.clients is None

    def __str__(self) -> str:
        if self.times is not None:
            return "the times of the trace"
        return f"{self.clients} client(s)" if self.rate is None else f"{self.rate:g} requests/s"


class Level:
    """A level while it runs, and afterwards.

    Args:
        plan: Its load.
        make: Makes the requests.
        connect: Makes connections.
        limits: Limits of the generator.
        rng: Source of randomness of the times.
        clock: Clock of all times, in seconds.
    """

    def __init__(
        self,
        plan: Plan,
        make: Maker,
        connect: Callable[[], Connection],
        limits: Limits,
        rng: np.random.Generator,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.plan = plan
        self.records = Records()
        self._make = make
        self._connect = connect
        self._limits = limits
        self._rng = rng
        self._clock = clock
        self.started = math.nan
        self._stopped = math.inf
        """Seconds from the start at which the user ended the load."""
        self._cpu_s = 0.0
        self.server: dict[str, Any] | None = None
        """Work of the server meanwhile; None if it does not say."""

    async def run(self) -> None:
        """Run the load to its end. Cancellation ends it at once; its numbers are then those so far."""
        plan, cpu_before_s = self.plan, time.process_time()
        times: Sequence[float] | NDArray[np.float64] | None = plan.times
        if times is None and plan.rate is not None:
            times = arrival_times(plan.rate, plan.seconds, self._rng, plan.burstiness)
        generator = Generator(self._make, self._connect, self.records, self._limits, self._clock)
        self.started = self._clock()
        try:
            if times is None:
                await generator.closed_loop(plan.clients or 1, plan.seconds)
            else:
                listed = times if isinstance(times, Sequence) else times.tolist()
                await generator.open_loop(listed, self.started)
        except anyio.get_cancelled_exc_class():
            self._stopped = self._clock() - self.started
            raise
        finally:
            self._cpu_s = time.process_time() - cpu_before_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since its start; 0 before."""
        return 0.0 if math.isnan(self.started) else self._clock() - self.started

    @property
    def is_whole(self) -> bool:
        """True unless the user has ended it."""
        return math.isinf(self._stopped)

    def report(self) -> dict[str, Any]:
        """Return the numbers of the level, as JSON has them."""
        plan, columns = self.plan, self._columns()
        placed = columns.due if plan.is_open else columns.ended
        windows = self._windows()
        first, last = (windows[0][0], windows[-1][1]) if windows else (plan.warmup_s, plan.warmup_s)
        inside = (placed >= first) & (placed < last)
        measured = columns.where(inside)
        answered = measured.where(measured.is_ok)
        rounds = [self._round(columns, placed, *window) for window in windows]
        p50 = _latencies(answered)
        by_rounds = Spread.of([_number(each["p50_ms"]) for each in rounds])
        generator = self._generator(p50["p50"])
        stages, timed = self.records.stage_ms(inside)
        mean_ms = columns.where(inside & self.records.has_timing()).latency_s.mean() * 1e3 if timed else 0.0
        if timed:
            stages = {name: rounded(ms) for name, ms in stages.items()}
            stages["rest"] = rounded(max(mean_ms - sum(stages.values()), 0.0))
        return {
            "mode": "open" if plan.is_open else "closed",
            "offered_rate": None if not plan.is_open else rounded(len(measured) / max(last - first, 1e-9)),
            "clients": plan.clients,
            "seconds": rounded(last - first),
            "is_whole": self.is_whole,
            "requests": _counts(measured, plan.slo_s),
            "rates": {name: _spread(rounds, name) for name in ("answered", "goodput", "items", "tokens")},
            "latency_ms": {**p50, "p50_rounds": None if by_rounds is None else by_rounds.report()},
            "rejected_p50_ms": rounded(quantile(measured.latency_s[measured.status == REJECTED] * 1e3, 0.5)),
            "kinds": self._kinds(measured),
            "stages_ms": dict(stages) if timed else None,
            "generator": generator,
            "server": self.server,
            "rounds": rounds,
            "timeline": _timeline(columns),
            "sent": {name: count for name, count in statuses(self.records).items() if name != WORDS[NOT_SENT]},
        }

    def _columns(self) -> Columns:
        """Return the rows with times from the start."""
        columns = self.records.columns()
        return replace(
            columns,
            due=columns.due - self.started,
            sent=columns.sent - self.started,
            ended=columns.ended - self.started,
        )

    def _windows(self) -> list[tuple[float, float]]:
        plan = self.plan
        bounds = [plan.warmup_s + number * plan.round_s for number in range(plan.rounds + 1)]
        stopped = self._stopped
        return [
            (begin, min(end, stopped))
            for begin, end in pairwise(bounds)
            if end <= stopped or stopped - begin >= LEAST_WINDOW_S
        ]

    def _round(self, columns: Columns, placed: NDArray[np.float64], begin: float, end: float) -> dict[str, Any]:
        """Return the numbers of one round. Its rates are of answers that ended in it."""
        seconds, slo_s = end - begin, self.plan.slo_s
        due = columns.where((placed >= begin) & (placed < end))
        ended = columns.where((columns.ended >= begin) & (columns.ended < end) & columns.is_ok)
        answered = due.latency_s[due.is_ok]
        good = len(ended) if slo_s is None else int((answered <= slo_s).sum())
        tokens = ended.tokens
        return {
            "seconds": rounded(seconds),
            "due": len(due),
            "answered": rounded(len(ended) / seconds),
            "goodput": rounded(good / seconds),
            "items": rounded(int(ended.items.sum()) / seconds),
            "tokens": None if not len(tokens) or (tokens < 0).any() else rounded(int(tokens.sum()) / seconds),
            "p50_ms": rounded(quantile(answered * 1e3, 0.5)),
            "p99_ms": rounded(quantile(answered * 1e3, 0.99)) if len(answered) >= LEAST_SAMPLES else None,
        }

    def _generator(self, p50_ms: float | None) -> dict[str, Any]:
        lateness = np.array(self.records.lateness, np.float64)
        p99_s = quantile(lateness, 0.99)
        is_late = p50_ms is not None and p99_s > LATE_S and p99_s * 1e3 > LATE_SHARE * p50_ms
        return {
            "lateness_p50_ms": rounded(quantile(lateness, 0.5) * 1e3),
            "lateness_p99_ms": rounded(p99_s * 1e3),
            "cpu_ms_per_request": rounded(self._cpu_s * 1e3 / len(self.records)) if len(self.records) else None,
            "connections": self.records.connections,
            "resent": self.records.resent,
            "is_bottleneck": bool(is_late),
        }

    def _kinds(self, measured: Columns) -> dict[str, Any]:
        kinds = np.unique(measured.kind).tolist()
        if len(kinds) < 2:
            return {}
        each = {KINDS[kind]: measured.where(measured.kind == kind) for kind in kinds}
        return {
            name: {
                "requests": _counts(rows, self.plan.slo_s),
                "latency_ms": _latencies(rows.where(rows.is_ok)),
            }
            for name, rows in each.items()
        }


def statuses(records: Records) -> dict[str, int]:
    """Return the number of requests by outcome, those of the warm-up included."""
    return {WORDS.get(status, str(status)): count for status, count in sorted(records.statuses.items())}


def _latencies(answered: Columns) -> dict[str, Any]:
    return latency_report(answered.latency_s, answered.due, np.random.default_rng(BOOTSTRAP_SEED))


def _counts(rows: Columns, slo_s: float | None) -> dict[str, int]:
    answered = int(rows.is_ok.sum())
    apart = {REJECTED: "rejected", NOT_SENT: "not_sent", UNFINISHED: "unfinished"}
    counts = {word: int((rows.status == status).sum()) for status, word in apart.items()}
    late = 0 if slo_s is None else int((rows.latency_s[rows.is_ok] > slo_s).sum())
    failed = len(rows) - answered - sum(counts.values())
    return {"due": len(rows), "answered": answered, "late": late, "failed": failed, **counts}


def _spread(rounds: Sequence[dict[str, Any]], name: str) -> dict[str, float] | None:
    spread = Spread.of([_number(each[name]) for each in rounds])
    return None if spread is None else spread.report()


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _timeline(columns: Columns) -> list[dict[str, Any]]:
    """Return the numbers of each second of the load, warm-up included.

    A request belongs to the second in which it was due.
    """
    rows = []
    seconds = np.floor(columns.due)
    order = np.argsort(seconds, kind="stable")
    last = int(seconds.max()) if len(seconds) else -1
    bounds = np.searchsorted(seconds[order], np.arange(last + 2)).tolist()
    for second in range(last + 1):
        due = columns.at(order[bounds[second] : bounds[second + 1]])
        ms = due.latency_s[due.is_ok] * 1e3
        rows.append({
            "at_s": second,
            "due": len(due),
            "answered": len(ms),
            "rejected": int((due.status == REJECTED).sum()),
            "failed": int(((due.status != OK) & (due.status != REJECTED) & (due.status != UNFINISHED)).sum()),
            "p50_ms": rounded(quantile(ms, 0.5)),
            "p90_ms": rounded(quantile(ms, 0.9)),
            "max_ms": rounded(float(ms.max())) if len(ms) else None,
        })  # fmt: skip
    return rows
