"""The check of the model: real servers on this machine, beside what the unit costs predict."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Final

from perf.scale.costs import UnitCosts, read_costs
from perf.scale.devices import cpu_device
from perf.scale.linear import Linear, Work
from perf.scale.need import Traffic
from perf.scale.shard import Arriving, Outcome, Shard, simulate
from perf.tools import report
from perf.tools.load import Load, LoadGenerator
from perf.tools.openloop import Arrivals, ArrivalsOutcome, OpenLoop
from perf.tools.report import number
from perf.tools.servers import MAX_CONNECTIONS, Options, Server, overload_flags, serving
from perf.tools.texts import Shape, TextSource
from perf.tools.workers import worker
from staged_pool.runtime.machine.cores import usable_cores

FRONTS: Final = (0, 1, 2)
"""Fronts of the servers; 0 is one process."""
LOADS: Final[tuple[Shape, ...]] = ("s1", "m8")
CLIENTS: Final[dict[Shape, int]] = {"s1": 64, "m8": 16}
"""Clients of the closed loop that measures the capacity."""
PARTS: Final = (0.3, 0.6, 0.8)
"""Rates of the open loops, as parts of the measured capacity."""

WARM_UP_S: Final = 1.0
PATIENCE_S: Final = 30.0
TARGET_DELAY_S: Final = 5.0
ROUNDS: Final = 6
"""Simulations until rate and batch size agree with the cores that they leave to forwards."""
SIMULATED: Final = 3_000
"""Requests of one simulation; fewer if they have several texts."""
LEAST_CORES: Final = 0.05
"""Cores that forwards have at least."""

COLUMNS: Final = (
    "fronts, load", "requests/s", "answered/s", "predicted", "p50 ms", "predicted", "p99 ms", "predicted", "rejected",
    "others' cores",
)  # fmt: skip
NOTE: Final = (
    "requests/s: offered at random times, or the clients of a closed loop, whose rate is the capacity; clients share "
    "the cores; predictions leave out the cores that other programs used"
)


@dataclass(frozen=True, slots=True)
class Point:
    """One measured load."""

    per_s: float
    p50_ms: float
    p99_ms: float
    rejected: int = 0
    others_cores: float = 0.0
    """Cores that other programs used meanwhile."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A server on this machine, whose clients share its cores."""

    costs: UnitCosts
    traffic: Traffic
    fronts: int
    cores: float

    def predict(self, arriving: Arriving) -> Outcome:
        """Predict one load.

        Loops, tokenizing and clients come first, because their threads sleep and wake. Forwards get the cores that
        they leave, which is the reduced-service approximation of priority queues. How much they leave depends on the
        rate and on the size of batches, so the simulation is repeated until both agree.
        """
        cores = self.cores / 2
        outcome = self._simulate(arriving, cores)
        for _ in range(ROUNDS):
            left = max(LEAST_CORES * self.cores, self.cores - self._others(outcome))
            cores = (cores + left) / 2
            outcome = self._simulate(arriving, cores)
        return outcome

    def _simulate(self, arriving: Arriving, cores: float) -> Outcome:
        shard = Shard(costs=self.costs, device=cpu_device(self.costs, cores), traffic=self.traffic, fronts=self.fronts)
        return simulate(shard, arriving)

    def _others(self, outcome: Outcome) -> float:
        """Return the cores that everything but forwards takes."""
        costs, texts = self.costs, outcome.per_s * self.traffic.texts
        work = self.traffic.work(texts, outcome.texts / outcome.batches)
        calls = Work(0.0, texts, texts * self.traffic.tokens, texts / min(16.0, self.traffic.texts))
        if self.fronts:
            loops: Sequence[Linear] = (costs.front_loop, costs.engine_loop)
            preprocess = costs.front_preprocess
        else:
            loops, preprocess = (costs.one_loop,), costs.one_preprocess
        return sum(loop.of(work) for loop in loops) + preprocess.of(calls) + costs.client.of(work)


@dataclass(slots=True)
class _Checked:
    """Rows and results so far."""

    rows: list[list[str]] = field(default_factory=list)
    results: list[dict[str, object]] = field(default_factory=list)

    def keep(self, name: str, machine: Machine, measured: Point, arriving: Arriving) -> None:
        """Predict a measured load, and keep both."""
        outcome = replace(machine, cores=machine.cores - measured.others_cores).predict(arriving)
        p50_ms, p99_ms = 1e3 * outcome.percentile_s(0.5), 1e3 * outcome.percentile_s(0.99)
        predicted = Point(outcome.per_s, p50_ms, p99_ms, outcome.rejected)
        figures = ((each.per_s, each.p50_ms, each.p99_ms) for each in (measured, predicted))
        cells = [number(value) for pair in zip(*figures, strict=True) for value in pair]
        offered = number(arriving.per_s) if arriving.per_s else f"{arriving.clients} clients"
        self.rows.append([name, offered, *cells, str(measured.rejected), f"{measured.others_cores:.2f}"])
        self.results.append(
            {"load": name, "offered": offered, "measured": asdict(measured), "predicted": asdict(predicted)}
        )


def check(options: Options, *, seconds: float) -> None:
    """Measure servers, predict the same loads, print and record both.

    Args:
        options: Options of the servers.
        seconds: Seconds of one load.
    """
    costs, source = read_costs(), TextSource(options.model)
    settings = {"options": options, "seconds": seconds, "fronts": FRONTS, "loads": LOADS}
    with report.recording("scale-check", settings) as record:
        checked = _Checked()
        for fronts in FRONTS:
            command = [*options.serve_command(), "--api-servers", str(fronts), *overload_flags(TARGET_DELAY_S)]
            with serving(command) as server:
                server.card()
                for shape in LOADS:
                    machine = Machine(costs, Traffic.of(shape), fronts, usable_cores())
                    _check(checked, server, source, machine, seconds)
        record.results["points"] = checked.results
        report.show_table("Measured and predicted", COLUMNS, checked.rows, NOTE)


def _check(checked: _Checked, server: Server, source: TextSource, machine: Machine, seconds: float) -> None:
    """Check one server with requests of one shape: the closed loop first, then the open loops."""
    shape = machine.traffic.shape
    name, requests = f"{machine.fronts}, {shape}", source.workload(shape).requests
    simulated = round(SIMULATED / machine.traffic.texts) + 300
    most = _watched(lambda: _closed(server, requests, CLIENTS[shape], seconds))
    checked.keep(name, machine, most, Arriving(requests=simulated, clients=CLIENTS[shape]))
    with worker(partial(OpenLoop, server.port, requests)) as generate:
        for place, part in enumerate(PARTS):
            arrivals = Arrivals(
                rate=part * most.per_s,
                seconds=seconds,
                seed=place,
                timeout_s=PATIENCE_S,
                max_connections=MAX_CONNECTIONS,
            )
            point = _watched(lambda arrivals=arrivals: _open(generate(arrivals)))  # type: ignore[misc]
            checked.keep(name, machine, point, Arriving(requests=simulated, per_s=arrivals.rate))


def _watched(run: Callable[[], Point]) -> Point:
    """Measure a load, and the cores that other programs use meanwhile."""
    began, others_s = time.perf_counter(), report.others_s()
    point = run()
    return replace(point, others_cores=max(0.0, (report.others_s() - others_s) / (time.perf_counter() - began)))


def _closed(server: Server, requests: tuple[bytes, ...], clients: int, seconds: float) -> Point:
    with worker(partial(LoadGenerator, server.port, requests)) as generate:
        generate(Load(clients=clients, seconds=WARM_UP_S, patience_s=PATIENCE_S))
        outcome = generate(Load(clients=clients, seconds=seconds, patience_s=PATIENCE_S))
    return Point(outcome.rate, *_percentiles(outcome.latencies_ms))


def _open(outcome: ArrivalsOutcome) -> Point:
    return Point(outcome.goodput, *_percentiles(outcome.accepted_ms), len(outcome.rejected_ms))


def _percentiles(values_ms: Sequence[float]) -> tuple[float, float]:
    summary = report.Summary.of(values_ms)
    assert summary is not None  # a load without an answer raises before
    return summary.p50, summary.p99
