"""Plugins: waiting hooks beside each other, and `/health` beside hooks that compute."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from perf.contenders.slow_plugins import LOAD_S, PLUGINS
from perf.tools import report
from perf.tools.client import post
from perf.tools.load import HealthProbe, Load, LoadGenerator, ProbeOutcome
from perf.tools.servers import ROOT, Options, Server, serving
from perf.tools.workers import worker

WAITING: Final = {"coroutine": "awaitedload", "plain function": "plainload"}
BURNING: Final = {
    "no load": None,
    "pure Python, in a process": "burningapart",
    "C without the lock, in a thread": "compressing",
    "pure Python, in a thread": "burning",
}
REQUESTS: Final = 100
"""Requests at once whose hooks wait."""


def run(options: Options, *, rounds: int, seconds: float) -> None:
    """Measure, print and record. The kinds of hooks alternate in each round, on the same servers."""
    settings = {"options": options, "rounds": rounds, "seconds": seconds, "requests": REQUESTS, "load_s": LOAD_S}
    taken: dict[str, list[float]] = {name: [] for name in WAITING}
    health: dict[str, list[ProbeOutcome]] = {name: [] for name in BURNING}
    with report.recording("plugins", settings) as record, report.progress("plugins", rounds) as bar:
        with _serving(options, preprocess_limit=1) as one, _serving(options, preprocess_limit=2) as two:
            for _ in range(rounds):
                for name, plugin in WAITING.items():
                    taken[name].append(_wait_together(one, plugin, REQUESTS if name == "coroutine" else REQUESTS // 10))
                for name, burning in BURNING.items():
                    health[name].append(_probe(two, burning, seconds))
                bar.advance(bar.task_ids[0])
        medians = {name: statistics.median(each) for name, each in taken.items()}
        record.results |= {"waiting_s": medians, "health_ms": {n: _summary(o) for n, o in health.items()}}
        rows = [
            ["coroutine", str(REQUESTS), report.number(medians["coroutine"])],
            ["plain function", str(REQUESTS // 10), report.number(medians["plain function"])],
        ]
        report.show_table(f"Loads of {LOAD_S:g} s at --preprocess-limit 1", ["load is a", "at once", "seconds"], rows)
        report.show_table(
            "/health beside two clients whose hooks compute, --preprocess-limit 2",
            ["hook", "p50 ms", "p99 ms", "max ms", "n"],
            [[name, *report.Summary.cells(_summary(each))] for name, each in health.items()],
            "medians and percentiles over all rounds",
        )


def _summary(outcomes: list[ProbeOutcome]) -> report.Summary | None:
    return report.Summary.of([ms for outcome in outcomes for ms in outcome.latencies_ms])


@contextmanager
def _serving(options: Options, *, preprocess_limit: int) -> Iterator[Server]:
    """Serve all plugins without a model, as installed packages have them."""
    with tempfile.TemporaryDirectory(prefix="perf-plugins-") as folder:
        about = Path(folder, "slow_plugins.dist-info")
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-plugins\nVersion: 1\n")
        names = {kind.__name__.lower(): kind.__name__ for kind in PLUGINS}
        points = "\n".join(f"{name} = perf.contenders.slow_plugins:{kind}" for name, kind in names.items())
        (about / "entry_points.txt").write_text(f"[staged_pool.plugins]\n{points}\n")
        command = [*options.serve_command(), "--preprocess-limit", str(preprocess_limit)]
        for name in names:
            command += ["--plugin", name]
        with serving(command, variables={"PYTHONPATH": f"{folder}:{ROOT}"}) as server:
            server.wait_ok("/ready")
            yield server


def _request(plugin: str) -> bytes:
    return post("/pooling", b'{"data": {"text": "a"}, "plugin": "%s"}' % plugin.encode())


def _wait_together(server: Server, plugin: str, requests: int) -> float:
    """Return the seconds of requests that are sent at once."""
    with worker(partial(LoadGenerator, server.port, (_request(plugin),))) as generate:
        generate(Load(clients=4, max_requests=4))
        return generate(Load(clients=requests, max_requests=requests)).elapsed_s


def _probe(server: Server, plugin: str | None, seconds: float) -> ProbeOutcome:
    """Probe `/health`, beside two clients of a plugin."""
    with worker(partial(HealthProbe, server.port)) as probe:
        if plugin is None:
            return probe(seconds)
        with worker(partial(LoadGenerator, server.port, (_request(plugin),))) as generate:
            generate(Load(clients=2, max_requests=4))
            generate.begin(Load(clients=2, seconds=seconds, patience_s=5.0))
            outcome = probe(seconds)
            generate.end()
            return outcome
