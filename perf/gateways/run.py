"""The measurement of gateways: trials, tables and targets."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from perf.gateways.gateway import GATEWAYS, NotInstalled
from perf.gateways.replicas import FLAGS, replicas
from perf.gateways.trial import Outcome, Plan, run_trial
from perf.tools import report
from perf.tools.known_vectors import known_vectors, tiny_model
from staged_pool.runtime.config import EngineConfig

KIND: Final = "bert-mean"
"""Kind of the replicas' model, which code builds: its forward takes a millisecond, so gateways see many requests."""

TEXTS: Final = 2000

STEADY: Final = ("gateway", "capacity/s", "requests", "failed", "wrong", "retried", "p50 ms", "p99", "max")
OVERLOADED: Final = ("gateway", "offered", "200", "429", "503", "other", "broken", "timeouts", "p99 of 200, ms")


def model_of_replicas(folder: Path) -> EngineConfig:
    """Build the model of the replicas."""
    return tiny_model(folder, KIND, offline=True)


def run(names: Sequence[str], *, requests: int, overload_s: float) -> None:
    """Measure gateways in turn, print, and record. Those that are not installed are named and left out."""
    plan = Plan(requests=requests, warm_up_requests=min(3000, max(200, requests // 10)), overload_s=overload_s)
    settings = {"gateways": list(names), "plan": plan, "replica_flags": FLAGS, "model": KIND}
    with report.recording("gateways", settings) as record, tempfile.TemporaryDirectory(prefix="perf-") as scratch:
        folder = Path(scratch)
        folder.chmod(0o755)
        model = model_of_replicas(folder / "model")
        vectors = known_vectors(model, TEXTS)
        outcomes: list[Outcome] = []
        with replicas(Path(str(model.model)), folder / "replicas") as running:
            for name in names:
                try:
                    outcomes.append(run_trial(GATEWAYS[name], running, vectors, plan, folder / name))
                except NotInstalled as missing:
                    report.console.print(str(missing))
        report.show_table("steady load; kill -9, drain, roll", STEADY, [_steady_row(each) for each in outcomes])
        if overload_s:
            report.show_table("twice the capacity", OVERLOADED, [_overload_row(each) for each in outcomes])
        for each in outcomes:
            record.results[each.gateway] = asdict(each) | {"steady": _summary(each), "overload": _overload(each)}
            for failure in each.failures:
                report.console.print(f"{each.gateway}: {failure}")
            record.show_target(f"{each.gateway}: failed requests", _failed(each), 0, "")
            record.show_target(f"{each.gateway}: wrong vectors", each.steady.wrong, 0, "")
            if each.overload is not None:
                unwanted = sum(each.overload.other_statuses.values()) + each.overload.broken + each.overload.timeouts
                record.show_target(f"{each.gateway}: overload answered by neither 200 nor 429", unwanted, 0, "")


def _summary(outcome: Outcome) -> dict[str, object]:
    steady = outcome.steady
    return {
        "requests": steady.asked,
        "failed": _failed(outcome),
        "wrong": steady.wrong,
        "outcomes": {"429": steady.rejected, **steady.failed},
        "seconds": round(outcome.steady_s, 1),
        "latency_ms": report.Summary.of(_latencies_ms(outcome)),
        "failures": outcome.failures,
    }


def _overload(outcome: Outcome) -> dict[str, object] | None:
    """Return the counts of the overload, and the percentiles of its times."""
    if outcome.overload is None:
        return None
    found = asdict(outcome.overload).items()
    return {name: report.Summary.of(value) if isinstance(value, list) else value for name, value in found}


def _failed(outcome: Outcome) -> int:
    """Return the number of requests of the steady load without an answer with 200."""
    return outcome.steady.asked - outcome.steady.answers - outcome.steady.wrong


def _latencies_ms(outcome: Outcome) -> list[float]:
    return [1e3 * seconds for seconds in outcome.steady.times_s]


def _steady_row(outcome: Outcome) -> list[str]:
    steady = outcome.steady
    counts = (steady.asked, _failed(outcome), steady.wrong, "-" if outcome.retried is None else outcome.retried)
    p50, p99, most, _ = report.Summary.cells(report.Summary.of(_latencies_ms(outcome)))
    return [outcome.gateway, report.number(outcome.capacity), *map(str, counts), p50, p99, most]


def _overload_row(outcome: Outcome) -> list[str]:
    overload = outcome.overload
    if overload is None:
        return [outcome.gateway]
    others = sum(count for status, count in overload.other_statuses.items() if status != 503)
    counts = (overload.offered, len(overload.accepted_ms), len(overload.rejected_ms))
    more = (overload.other_statuses.get(503, 0), others, overload.broken, overload.timeouts)
    _, p99, _, _ = report.Summary.cells(report.Summary.of(overload.accepted_ms))
    return [outcome.gateway, *map(str, (*counts, *more)), p99]
