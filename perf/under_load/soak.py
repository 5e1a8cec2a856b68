"""Growth of memory, threads and descriptors over minutes of steady load with misbehaving clients."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
import numpy as np
import psutil

from perf.tools import report
from perf.tools.load import Load, closed_loop_rate
from perf.tools.openloop import Arrivals, ArrivalsOutcome, OpenLoop
from perf.tools.servers import Options, Server, serving
from perf.tools.texts import SHAPES, Shape, TextSource
from perf.tools.workers import worker
from perf.under_load.faults import BODY_LIMIT_MB, KINDS, Misuse, MisuseOutcome, Misusers

LOAD_SHARE: Final = 0.6
"""Offered load as a share of the measured capacity."""
CAPACITY_CLIENTS: Final = 16
CAPACITY_S: Final = 5.0
SAMPLE_S: Final = 2.0
CLOSING_S: Final = 0.1
"""Time for the server to close the connections of a sample, which must not count."""
SETTLE_S: Final = 120.0
"""Time left out of the slopes, in which caches and pools fill; at most a fifth of the whole."""
QUIET_S: Final = 20.0
"""Maximum time after the load until the server must be idle."""
TIMEOUT_S: Final = 10.0
MAX_CONNECTIONS: Final = 400
SEED: Final = 2

GROWTH_MB: Final = 5.0
WANDER: Final = 1.0
"""Maximum slope of threads and file descriptors per 10 minutes; connections come and go."""

HTTP_GAUGES: Final = ("staged_pool_connections", "staged_pool_http_requests_running")


@dataclass(frozen=True, slots=True)
class _Admission:
    requests: int
    items: int
    tokens: int
    body_bytes: int
    drain_s: float
    lag_s: float


@dataclass(frozen=True, slots=True)
class _Stage:
    name: str
    waiting: int
    busy: int
    crashes: int


@dataclass(frozen=True, slots=True)
class _Engine:
    admission: _Admission
    stages: tuple[_Stage, ...]


@dataclass(frozen=True, slots=True)
class _Stages:
    models: dict[str, _Engine]


@dataclass(frozen=True, slots=True)
class Sample:
    """State of the server at one moment."""

    at_s: float
    """Seconds since the start of the load."""
    rss_mb: float
    threads: int
    fds: int
    connections: int
    """TCP sockets among the file descriptors, the listening one included."""
    gauges: dict[str, float]

    @classmethod
    def of(cls, server: Server, at_s: float) -> Sample:
        (engine,) = msgspec.json.decode(server.wait_ok("/stages").body, type=_Stages).models.values()
        admission = engine.admission
        gauges: dict[str, float] = {
            "requests": admission.requests, "items": admission.items, "tokens": admission.tokens,
            "body_bytes": admission.body_bytes, "drain_s": admission.drain_s,
        }  # fmt: skip
        for stage in engine.stages:
            gauges |= {f"{stage.name} waiting": stage.waiting, f"{stage.name} busy": stage.busy}
            gauges[f"{stage.name} crashes"] = stage.crashes
        http = server.gauges(*HTTP_GAUGES)
        time.sleep(CLOSING_S)
        process = psutil.Process(server.process.pid)
        with process.oneshot():
            rss_mb = process.memory_info().rss / 1e6
            threads, fds = process.num_threads(), process.num_fds()
            connections = len(process.net_connections("tcp"))
        return cls(at_s, rss_mb, threads, fds, connections, gauges | http)

    def in_use(self) -> dict[str, float]:
        """Return the gauges of the engine that are not zero."""
        return {name: value for name, value in self.gauges.items() if value and name not in HTTP_GAUGES}


def run(options: Options, *, shape: Shape, minutes: float, share: float) -> None:
    """Measure, print and record.

    The load is an open loop at `LOAD_SHARE` of the capacity. Each kind of misuse is `share` of the requests.
    """
    workload = TextSource(options.model).workload(shape)
    seconds = minutes * 60
    settings = {"options": options, "load": SHAPES[shape], "minutes": minutes, "share_of_each_fault": share}
    command = [*options.serve_command(), "--body-limit-mb", str(BODY_LIMIT_MB)]
    with report.recording("soak", settings) as record, serving(command) as server:
        record.results["model"] = server.card()
        closed = Load(clients=CAPACITY_CLIENTS, seconds=CAPACITY_S, patience_s=TIMEOUT_S)
        capacity = closed_loop_rate(server.port, workload.requests, closed)
        rate = LOAD_SHARE * capacity
        before = _quiet(server)
        with (
            worker(partial(OpenLoop, server.port, workload.requests)) as offer,
            worker(partial(Misusers, server.port, workload.requests[0])) as misuse,
            report.progress("soak", round(seconds)) as bar,
        ):
            arrivals = Arrivals(
                rate=rate, seconds=seconds, seed=SEED, timeout_s=TIMEOUT_S, max_connections=MAX_CONNECTIONS
            )
            offer.begin(arrivals)
            misuse.begin(Misuse(rate=rate * share, seconds=seconds, seed=SEED))
            samples = _watch(server, seconds, lambda done: bar.update(bar.task_ids[0], completed=done))
            good, bad = offer.end(), misuse.end()
        after = _quiet(server)
        record.results |= {"capacity_per_s": capacity, "offered_per_s": rate, "before": before, "after": after}
        _report(record, samples, (before, after), good, bad)


def _watch(server: Server, seconds: float, progress: Callable[[float], None]) -> list[Sample]:
    started = time.perf_counter()
    samples: list[Sample] = []
    while (at_s := time.perf_counter() - started) < seconds:
        samples.append(Sample.of(server, at_s))
        progress(at_s)
        time.sleep(SAMPLE_S)
    return samples


def _quiet(server: Server) -> Sample:
    """Wait until the server is idle, without other connections than ours; return the state after `QUIET_S` at most."""
    started = time.perf_counter()
    while True:
        sample = Sample.of(server, time.perf_counter() - started)
        if (not sample.in_use() and sample.connections <= 2) or sample.at_s > QUIET_S:
            return sample
        time.sleep(SAMPLE_S / 4)


def _report(
    record: report.Record, samples: list[Sample], rest: tuple[Sample, Sample], good: ArrivalsOutcome, bad: MisuseOutcome
) -> None:
    before, after = rest
    few = samples[:: max(1, len(samples) // 8)]
    shown = [("before", before), *((f"{s.at_s:.0f} s", s) for s in few), ("after", after)]
    report.show_table(
        "The server under steady load",
        ["", "RSS MB", "threads", "fds", "connections", "requests", "tokens"],
        [
            [
                name,
                f"{s.rss_mb:.1f}",
                str(s.threads),
                str(s.fds),
                str(s.connections),
                _number(s, "requests"),
                _number(s, "tokens"),
            ]
            for name, s in shown
        ],
    )
    report.show_table(
        "Misuse",
        ["a client that", "got"],
        [[kind, ", ".join(f"{n} x {s}" for s, n in bad.statuses.get(kind, {}).items()) or "-"] for kind in KINDS],
    )
    latency = report.Summary.of(good.accepted_ms)
    strange = dict(bad.unexpected) | {f"good request: {s}": n for s, n in good.other_statuses.items()}
    record.results |= {
        "samples": samples, "misuse": bad.statuses, "unexpected": strange, "skipped_misuse": bad.skipped,
        "accepted_ms": latency, "rejected": len(good.rejected_ms), "timeouts": good.timeouts,
        "broken_connections": good.broken, "not_sent": good.not_sent,
    }  # fmt: skip
    cells = report.Summary.cells(latency)
    report.console.print(f"good requests: {cells[3]} answered, p50 {cells[0]} ms, p99 {cells[1]} ms, max {cells[2]} ms")
    for what, count in strange.items():
        report.console.print(f"unexpected: {count} x {what}")
    if in_use := after.in_use():
        report.console.print(f"not at rest at the end: {in_use}")
    settled = _settled(samples)
    record.show_target("RSS growth", _slope(settled, lambda s: s.rss_mb), GROWTH_MB, "MB per 10 min")
    record.show_target("growth of threads", _slope(settled, lambda s: s.threads), WANDER, "per 10 min")
    fds_slope = _slope(settled, lambda s: s.fds - s.connections)
    record.show_target("growth of file descriptors, connections apart", fds_slope, WANDER, "per 10 min")
    record.show_target("file descriptors gained, at rest", after.fds - before.fds, 0, "fds")
    record.show_target("gauges of the engine that are not zero at the end", len(after.in_use()), 0, "gauges")
    record.show_target("unexpected outcomes of misuse", bad.unexpected.total(), 0, "")
    lost = len(good.rejected_ms) + good.timeouts + good.broken + good.not_sent + sum(good.other_statuses.values())
    record.show_target("good requests that were not answered with 200", lost, 0, "requests")


def _number(sample: Sample, gauge: str) -> str:
    return report.number(sample.gauges[gauge])


def _settled(samples: list[Sample]) -> list[Sample]:
    settle_s = min(SETTLE_S, samples[-1].at_s / 5)
    return [sample for sample in samples if sample.at_s >= settle_s]


def _slope(samples: list[Sample], value: Callable[[Sample], float]) -> float:
    """Return the slope of a value per 10 minutes, by least squares."""
    return 600.0 * float(np.polyfit([s.at_s for s in samples], [value(s) for s in samples], 1)[0])
