"""Goodput, latency and rejections of an overloaded server, by open loops."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import psutil

from perf.tools import report
from perf.tools.load import BURST, HealthProbe, Load, LoadGenerator, LoadOutcome, ProbeOutcome
from perf.tools.openloop import RECOVERY_PAUSE_S, Arrivals, ArrivalsOutcome, OpenLoop
from perf.tools.report import number
from perf.tools.servers import MAX_CONNECTIONS, Options, Server, overload_flags, serving
from perf.tools.texts import SHAPES, Shape, TextSource
from perf.tools.workers import Worker, worker

DEFAULT_SHAPE: Final[Shape] = "m8"
CAPACITY_CLIENTS: Final = (2, 4, 8, 16, 32)
UNLOADED_REQUESTS: Final = 50
LEVELS: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
SEED: Final = 1
TIMEOUT_S: Final = 10.0
RECOVERED: Final = 1.5
"""Latency that counts as recovered, as a multiple of the unloaded median."""

GAUGES: Final = ("staged_pool_lane_drain_seconds", "staged_pool_lane_lag_seconds")

KEPT: Final = 0.95
REJECT_MS: Final = 20.0
RECOVERY_S: Final = 1.0
GROWTH_MB: Final = 10.0
"""Target for the growth after the first round, in which the allocator's pools fill."""

COLUMNS: Final = (
    "load", "offered/s", "goodput/s", "of peak", "200", "429", "time-outs", "other", "200 p50 ms", "p99", "429 p50 ms",
    "p99", "Retry-After s",
)  # fmt: skip
SERVER_COLUMNS: Final = (
    "load", "health p50 ms", "p99", "max", "n", "recovery s", "RSS MB", "after", "drain s", "lag s",
    "client late p99 ms", "client cores", "others' cores",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Level:
    """Outcomes at one rate."""

    factor: float
    """Rate as a multiple of the measured capacity."""
    offered_per_s: float
    outcome: ArrivalsOutcome
    health: ProbeOutcome
    rss_before_mb: float
    rss_after_mb: float
    gauges: dict[str, float]
    """The server's own predictions right after the load."""
    others_cores: float
    """Cores used by unrelated processes; above a few tenths, a level is not comparable."""

    def with_round(self, other: Level) -> Level:
        """Return this level merged with that of a later round."""
        self.outcome.add(other.outcome)
        self.health.add(other.health)
        others_cores = max(self.others_cores, other.others_cores)
        return replace(self, rss_after_mb=other.rss_after_mb, gauges=other.gauges, others_cores=others_cores)

    @property
    def failed(self) -> int:
        """Number of requests with neither a 200, a 429 nor a timeout."""
        outcome = self.outcome
        return outcome.broken + outcome.not_sent + sum(outcome.other_statuses.values())

    def result(self, peak: float) -> dict[str, object]:
        """Return the figures for the JSON file."""
        outcome = self.outcome
        return {
            "factor": self.factor,
            "offered_per_s": self.offered_per_s,
            "offered_requests": outcome.offered,
            "goodput_per_s": outcome.goodput,
            "of_peak": outcome.goodput / peak,
            "accepted_ms": report.Summary.of(outcome.accepted_ms),
            "rejected_ms": report.Summary.of(outcome.rejected_ms),
            "retry_after_s": report.Summary.of(outcome.retry_after_s),
            "timeouts": outcome.timeouts,
            "other_statuses": outcome.other_statuses,
            "broken_connections": outcome.broken,
            "not_sent": outcome.not_sent,
            "client_late_ms": report.Summary.of(outcome.late_ms),
            "client_cores": outcome.client_cpu_s / outcome.accepted_s,
            "connections": outcome.connections,
            "health_ms": report.Summary.of(self.health.latencies_ms),
            "health_timeouts": self.health.timeouts,
            "recovered_s": outcome.recovered_s,
            "rss_before_mb": self.rss_before_mb,
            "rss_after_mb": self.rss_after_mb,
            "gauges": self.gauges,
            "others_cores": self.others_cores,
        }

    def row(self, peak: float) -> list[str]:
        """Return the cells of a row with `COLUMNS`."""
        outcome = self.outcome
        accepted, rejected = (
            report.Summary.cells(report.Summary.of(values))[:2] for values in (outcome.accepted_ms, outcome.rejected_ms)
        )
        hints = outcome.retry_after_s
        return [
            f"{self.factor:g}x",
            number(self.offered_per_s),
            number(outcome.goodput),
            f"{outcome.goodput / peak:.0%}",
            str(len(outcome.accepted_ms)),
            str(len(outcome.rejected_ms)),
            str(outcome.timeouts),
            str(self.failed),
            *accepted,
            *rejected,
            f"{min(hints):g} to {max(hints):g}" if hints else "-",
        ]

    def server_row(self) -> list[str]:
        """Return the cells of a row with `SERVER_COLUMNS`."""
        outcome = self.outcome
        return [
            f"{self.factor:g}x",
            *report.Summary.cells(report.Summary.of(self.health.latencies_ms)),
            "never" if outcome.recovered_s is None else f"{outcome.recovered_s:.2f}",
            f"{self.rss_before_mb:.0f}",
            f"{self.rss_after_mb:.0f}",
            *(f"{self.gauges.get(gauge, 0.0):.2f}" for gauge in GAUGES),
            number(_p99(outcome.late_ms)),
            f"{outcome.client_cpu_s / outcome.accepted_s:.2f}",
            f"{self.others_cores:.2f}",
        ]


def run(
    options: Options,
    *,
    shape: Shape,
    seconds: float,
    rounds: int,
    target_delay_s: float,
    factors: Sequence[float] = LEVELS,
) -> None:
    """Measure, print and record.

    First, closed loops measure the capacity. Then open loops arrive at multiples of it, each followed by probes until
    the latency is that of an idle server. Rounds alternately go up and down the levels, so that a drift of the
    machine's speed does not bias them.
    """
    workload = TextSource(options.model).workload(shape)
    settings = {
        "options": options, "load": SHAPES[shape], "seconds": seconds, "rounds": rounds,
        "target_delay_s": target_delay_s, "client_timeout_s": TIMEOUT_S, "max_connections": MAX_CONNECTIONS,
        "seed": SEED,
    }  # fmt: skip
    command = [*options.serve_command(), *overload_flags(target_delay_s)]
    name = "overload" if shape == DEFAULT_SHAPE else f"overload-{shape}"
    with report.recording(name, settings) as record, serving(command) as server:
        record.results["model"] = server.card()
        with report.progress("overload", len(CAPACITY_CLIENTS) + rounds * len(factors)) as bar:
            with worker(partial(LoadGenerator, server.port, workload.requests)) as generate:
                unloaded_ms, closed = _capacity(generate, seconds / 4, lambda: bar.advance(bar.task_ids[0]))
            capacity = max(closed.values())
            record.results |= {"unloaded_p50_ms": unloaded_ms, "closed_loop_per_s": closed, "capacity_per_s": capacity}
            seen: dict[float, Level] = {}
            rss_mb = [_rss_mb(server)]
            with (
                worker(partial(OpenLoop, server.port, workload.requests)) as offer,
                worker(partial(HealthProbe, server.port)) as probe,
            ):
                for round_number, factor in _order(factors, rounds):
                    arrivals = Arrivals(
                        rate=factor * capacity,
                        seconds=seconds,
                        seed=SEED + round_number,
                        timeout_s=TIMEOUT_S,
                        max_connections=MAX_CONNECTIONS,
                        recovered_ms=RECOVERED * unloaded_ms,
                    )
                    level = _level(server, offer, probe, arrivals, factor)
                    seen[factor] = seen[factor].with_round(level) if factor in seen else level
                    rss_mb.append(level.rss_after_mb)
                    bar.advance(bar.task_ids[0])
        report.console.print(
            f"capacity {number(capacity)} requests/s in a closed loop ({SHAPES[shape]}), unloaded median "
            f"{number(unloaded_ms)} ms; target delay {target_delay_s:g} s, {rounds} x {seconds:g} s a level"
        )
        settled_mb = rss_mb[len(factors) if rounds > 1 else 0]
        _report(name, record, [seen[factor] for factor in factors], target_delay_s, rss_mb[-1] - settled_mb)


def _order(factors: Sequence[float], rounds: int) -> list[tuple[int, float]]:
    """Return the round and the factor of each level: up in one round, down in the next."""
    return [
        (round_number, factor)
        for round_number in range(rounds)
        for factor in (factors[::-1] if round_number % 2 else factors)
    ]


def _capacity(
    generate: Worker[Load, LoadOutcome], seconds: float, done: Callable[[], None]
) -> tuple[float, dict[int, float]]:
    """Measure the median latency of a single client in ms, and rates by clients.

    The single client pauses like the probes after a load, because caches are colder after a pause.
    """
    generate(BURST)
    alone = Load(clients=1, max_requests=UNLOADED_REQUESTS, pause_s=RECOVERY_PAUSE_S)
    unloaded = report.Summary.of(generate(alone).latencies_ms)
    if unloaded is None:
        raise RuntimeError("an idle server rejected every request")
    closed: dict[int, float] = {}
    for clients in CAPACITY_CLIENTS:
        closed[clients] = generate(Load(clients=clients, seconds=seconds, patience_s=TIMEOUT_S)).rate
        done()
    return unloaded.p50, closed


def _level(
    server: Server,
    offer: Worker[Arrivals, ArrivalsOutcome],
    probe: Worker[float, ProbeOutcome],
    arrivals: Arrivals,
    factor: float,
) -> Level:
    before_mb = _rss_mb(server)
    started, others_before_s = time.perf_counter(), report.others_s()
    offer.begin(arrivals)
    health = probe(arrivals.seconds)
    others_cores = max(0.0, (report.others_s() - others_before_s) / (time.perf_counter() - started))
    gauges = server.gauges(*GAUGES)
    outcome = offer.end()
    return Level(factor, arrivals.rate, outcome, health, before_mb, _rss_mb(server), gauges, others_cores)


def _rss_mb(server: Server) -> float:
    return float(psutil.Process(server.process.pid).memory_info().rss / 1e6)


def _report(name: str, record: report.Record, levels: list[Level], target_delay_s: float, growth_mb: float) -> None:
    peak = max(level.outcome.goodput for level in levels)
    rows = [level.row(peak) for level in levels]
    note = "of fewer than 100 samples, p99 is the largest; times run from when a request was due"
    report.show_table("Overload, open loop", COLUMNS, rows, note)
    server_rows = [level.server_row() for level in levels]
    report.show_table("The server meanwhile", SERVER_COLUMNS, server_rows, "drain and lag as predicted at the end")
    record.results |= {"peak_goodput_per_s": peak, "levels": [level.result(peak) for level in levels]}
    over = [level for level in levels if level.factor >= 1]
    _targets(record, over or levels, peak, target_delay_s)
    record.show_target("RSS gained after the first round", growth_mb, GROWTH_MB, "MB")
    report.write_markdown(name, (COLUMNS, rows), (SERVER_COLUMNS, server_rows), note=note)
    _plot(name, levels, target_delay_s)


def _targets(record: report.Record, over: list[Level], peak: float, target_delay_s: float) -> None:
    """Compare the worst level with each target; a missing recovery counts as infinite.

    Goodput counts only above 1x: at 1x, random arrivals leave the server idle at times, which is not due to overload.
    """
    outcomes = [level.outcome for level in over]
    lost = max((1 - level.outcome.goodput / peak for level in over if level.factor > 1), default=0.0)
    record.show_target("goodput lost against the peak, worst level", 100 * lost, 100 * (1 - KEPT), "%")
    record.show_target(
        "p99 of accepted, worst level", max(_p99(o.accepted_ms) for o in outcomes) / 1e3, target_delay_s, "s"
    )
    record.show_target("time-outs", sum(o.timeouts for o in outcomes), 0, "requests")
    record.show_target("answers that are neither 200 nor 429, and none", sum(level.failed for level in over), 0, "")
    record.show_target("time to reject, p99, worst level", max(_p99(o.rejected_ms) for o in outcomes), REJECT_MS, "ms")
    recovered = [o.recovered_s if o.recovered_s is not None else float("inf") for o in outcomes]
    record.show_target("recovery, slowest", max(recovered), RECOVERY_S, "s")


def _p99(values: Sequence[float]) -> float:
    summary = report.Summary.of(values)
    return summary.p99 if summary else 0.0


def _plot(name: str, levels: list[Level], target_delay_s: float) -> None:
    """Write `results/NAME.svg`: goodput and p99 of accepted requests, by offered rate."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    offered = [level.offered_per_s for level in levels]
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(7, 6), layout="constrained")
    top.plot(offered, [level.outcome.goodput for level in levels], "o-", label="goodput")
    top.plot(offered, offered, ":", color="grey", label="offered")
    top.set_ylim(0, 1.25 * max(level.outcome.goodput for level in levels))
    top.set_ylabel("answered with 200, requests/s")
    accepted = [_p99(level.outcome.accepted_ms) / 1e3 for level in levels]
    bottom.plot(offered, accepted, "o-", label="accepted, p99")
    bottom.axhline(target_delay_s, linestyle=":", color="grey", label="target delay")
    bottom.set_ylim(bottom=0)
    bottom.set_ylabel("s")
    bottom.set_xlabel("offered, requests/s")
    for axes in (top, bottom):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(report.RESULTS / f"{name}.svg")
    plt.close(figure)
