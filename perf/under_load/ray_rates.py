"""Rates of one replica on Ray Serve beside those of the server itself."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from perf.tools import report
from perf.tools.load import BURST, Load, LoadGenerator
from perf.tools.ray_cluster import HAPROXY, serve_cluster
from perf.tools.servers import Options, serving
from perf.tools.texts import SHAPES, Shape, TextSource, Workload
from perf.tools.workers import worker
from staged_pool.ray import app
from staged_pool.runtime.machine.cores import usable_cores

CELLS: Final[Mapping[Shape, tuple[int, ...]]] = {"s1": (1, 16, 64), "m8": (1, 4, 16, 64), "x64": (1, 4, 16)}
"""Clients of each load."""
PATIENCE_S: Final = 10.0


@dataclass
class Found:
    """Findings about all servers."""

    rates: dict[tuple[Shape, int], dict[str, list[float]]] = field(default_factory=dict)
    """Texts a second, by load, clients and server."""
    failed: Counter[str] = field(default_factory=Counter)
    """Requests that failed, by server and part."""


def run(rounds: int, seconds: float) -> None:
    """Measure, print the table, and write `ray-rates.json` or `ray-rates-haproxy.json`."""
    name = "ray-rates-haproxy" if HAPROXY else "ray-rates"
    options = Options(model=None, dtype="auto", torch_threads=None, backend="asyncio")
    source = TextSource(None)
    loads = {shape: source.workload(shape) for shape in CELLS}
    where = f"Ray, {'HAProxy' if HAPROXY else 'proxy in Python'}"
    found = Found()
    with report.recording(name, {"rounds": rounds, "seconds": seconds, "haproxy": HAPROXY}) as record:
        config = {"model": str(source.folder), "coalesce": False, "access-log": False}
        for _ in range(rounds):
            with serving([*options.serve_command(), "--no-access-log"]) as server:
                server.card()
                _measure("staged-pool serve", server.port, loads, seconds, found)
            with serve_cluster([0, usable_cores()]) as cluster:
                cluster.deploy(app(config, ray_actor_options={"num_cpus": usable_cores()}))
                _measure(where, cluster.port, loads, seconds, found)
        record.results["texts_a_second"] = {
            f"{shape}, {clients} clients": by for (shape, clients), by in found.rates.items()
        }
        record.results["failed_requests"] = dict(found.failed)
    rows = [
        (SHAPES[shape], str(clients), *(report.number(statistics.median(rates)) for rates in by.values()))
        for (shape, clients), by in found.rates.items()
    ]
    report.show_table("Texts a second, medians of the rounds", ("", "clients", "staged-pool serve", where), rows)
    failed = [(part, str(number)) for part, number in found.failed.items()]
    report.show_table("Requests that failed", ("", ""), failed)


def _measure(name: str, port: int, loads: Mapping[Shape, Workload], seconds: float, found: Found) -> None:
    """Add the rates of one server. A failed request is counted and not an end: HAProxy cuts some when it reloads."""
    for shape, workload in loads.items():
        for clients in CELLS[shape]:
            load = Load(clients=clients, seconds=seconds, patience_s=PATIENCE_S, strict=False)
            with worker(partial(LoadGenerator, port, workload.requests)) as generate:
                warm_up, outcome = generate(replace(BURST, strict=False)), generate(load)
            found.failed[f"{name}, warm-up"] += warm_up.failed
            found.failed[name] += outcome.failed
            rates = found.rates.setdefault((shape, clients), {}).setdefault(name, [])
            rates.append(outcome.rate * workload.texts_per_request)
            time.sleep(0.5)  # for the end of the connections
