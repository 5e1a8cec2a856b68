"""Replicas on Ray Serve under load: one is killed, all are replaced, and more is asked than they can do."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perf.tools import report
from perf.tools.checked_load import CheckedLoad
from perf.tools.known_vectors import known_vectors, tiny_model
from perf.tools.ray_cluster import HAPROXY, ServeCluster, serve_cluster
from staged_pool.api.config import ServerConfig
from staged_pool.ray import app
from staged_pool.runtime.config import EngineConfig

CLIENTS: Final = 24
SHARE: Final = 0.8
"""Steady load as a share of the measured capacity."""
LARGE: Final = 150
"""Texts of a request under overload."""
TARGET_DELAY_S: Final = 1.0

Vectors = Mapping[str, NDArray[np.float32]]
COLUMNS: Final = ("", "seconds", "right a second", "p50 ms", "p99 ms", "right", "wrong", "429", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Outcome of one load."""

    seconds: float
    right: int
    """Answers with the right vectors."""
    wrong: int
    rejected: int
    """Answers with status 429 and `Retry-After`."""
    failed: Mapping[str, int]
    """Other outcomes: the status, or the name of the error of a connection."""
    times_s: report.Summary | None
    """Times of the right answers."""

    def row(self) -> tuple[str, ...]:
        """Return the cells of a table, as in `COLUMNS`."""
        times = (
            ("-", "-")
            if self.times_s is None
            else (f"{each * 1e3:.0f}" for each in (self.times_s.p50, self.times_s.p99))
        )
        failures = ", ".join(f"{count} x {what}" for what, count in self.failed.items()) or "0"
        cells = (f"{self.seconds:.1f}", report.number(self.right / self.seconds), *times, str(self.right))
        return *cells, str(self.wrong), str(self.rejected), failures


def run(replicas: int, seconds: float) -> None:
    """Measure, print the table, and write `ray.json` or `ray-haproxy.json`."""
    name = "ray-haproxy" if HAPROXY else "ray"
    with report.recording(name, {"replicas": replicas, "seconds": seconds, "haproxy": HAPROXY}) as record:
        with tempfile.TemporaryDirectory() as folder:
            model = tiny_model(Path(folder) / "tiny", target_delay_s=TARGET_DELAY_S)
            vectors = known_vectors(model)
            with serve_cluster([0, replicas]) as cluster:
                begun_at = time.perf_counter()
                cluster.deploy(app(model, num_replicas=replicas))
                record.results["start_s"] = time.perf_counter() - begun_at
                _phases(cluster, vectors, model, replicas=replicas, seconds=seconds, record=record)
    rows = [(phase, *found.row()) for phase, found in record.results.items() if isinstance(found, Phase)]
    report.show_table(f"{replicas} replicas, {'HAProxy' if HAPROXY else 'proxy in Python'}", COLUMNS, rows)


def _phases(
    cluster: ServeCluster,
    vectors: Vectors,
    model: EngineConfig,
    *,
    replicas: int,
    seconds: float,
    record: report.Record,
) -> None:
    def measure(phase: str, during: Callable[[], object], *, rate: float | None, texts: int = 1) -> float:
        with CheckedLoad(cluster.port, vectors, clients=CLIENTS, rate=rate, texts=texts) as load:
            during()
        counts = load.counts
        record.results[phase] = found = Phase(
            seconds=load.seconds,
            right=counts.answers,
            wrong=counts.wrong,
            rejected=counts.rejected,
            failed=dict(counts.failed),
            times_s=report.Summary.of(counts.times_s),
        )
        report.console.print(f"{phase}: {', '.join(found.row())}")
        wrong, unavailable = f"{phase}: wrong vectors", f"{phase}: answers 503"
        record.keep_target(wrong, counts.wrong, 0, "")
        record.keep_target(unavailable, counts.failed["503"], 0, "")
        return counts.answers / load.seconds

    def kill() -> None:
        time.sleep(seconds / 4)
        killed = cluster.kill_replica()
        cluster.wait(lambda: killed not in (pids := cluster.pids()) and len(pids) == cluster.running() == replicas)
        time.sleep(seconds / 4)

    def update() -> None:
        old = set(cluster.pids())
        cluster.deploy(app(model, server=ServerConfig(log_clients=True), num_replicas=replicas))
        cluster.wait(lambda: not old & set(cluster.pids()))

    capacity = measure("as much as it can", lambda: time.sleep(seconds), rate=None)
    measure("steady, at 0.8 of that", lambda: time.sleep(seconds), rate=SHARE * capacity)
    measure("one replica killed", kill, rate=SHARE * capacity)
    measure("all replicas replaced", update, rate=SHARE * capacity)
    measure("too much", lambda: time.sleep(seconds), rate=None, texts=LARGE)
