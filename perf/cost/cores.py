"""CPU time by consumer while few or many clients load a server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import psutil

from perf.contenders.bare import BareLoad, BareLoop, Rate
from perf.peers.dialects import OURS
from perf.peers.inputs import SCENARIOS, UNITS, Inputs, Scenario
from perf.tools import report
from perf.tools.jpegs import clip_folder
from perf.tools.load import HealthProbe, Load, LoadGenerator, ProbeOutcome
from perf.tools.servers import Options, Server, serving
from perf.tools.texts import TextSource
from perf.tools.workers import Worker, pinned, worker

CLIENTS: Final[Mapping[Scenario, tuple[int, ...]]] = {
    "s1": (1, 4, 16, 64), "m8": (1, 16), "x64": (1,), "images": (1, 8), "photos": (1, 8),
}  # fmt: skip
PATIENCE_S: Final = 60.0

_GROUPS: Final = {
    "device": "device", "image device": "device", "preprocess": "preprocess", "image preproces": "preprocess",
}  # fmt: skip
"""Consumer of a thread's CPU time, by the thread's name without its number; see `DedicatedThreads`."""

_TAKERS: Final = ("event loop", "preprocess", "device", "other threads", "clients", "others", "idle")

RATE_COLUMNS: Final = (
    "load, clients", "a second", "of bare", "a batch", "event loop runs", "waits for a core", "health p50", "p99", "n",
)  # fmt: skip
RATE_NOTE: Final = "a batch: texts or images of one; the event loop's thread in parts of the time; /health in ms"

TAKEN_COLUMNS: Final = ("load, clients", *_TAKERS, "sum", "bare, such batches", "bare")
TAKEN_NOTE: Final = "ms of a core for each text or image; preprocess: of images; that of texts is in other threads"


@dataclass(slots=True)
class Cell:
    """One load, in all rounds."""

    scenario: Scenario
    clients: int
    units: int = 0
    """Number of texts or images answered."""
    elapsed_s: float = 0.0
    taken_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_TAKERS, 0.0))
    """CPU time in seconds, by `_TAKERS`."""
    loop_waited_s: float = 0.0
    device_units: float = 0.0
    batches: float = 0.0
    health: ProbeOutcome = field(default_factory=ProbeOutcome)
    bare_per_s: float = 0.0
    such_batches_per_s: float = 0.0
    """Rate of the plain loop, with forwards of the size of the server's batches."""

    @property
    def batch_units(self) -> float:
        return self.device_units / self.batches

    @property
    def name(self) -> str:
        return f"{self.scenario}, {self.clients}"

    def result(self) -> dict[str, object]:
        return asdict(self) | {"health": report.Summary.of(self.health.latencies_ms)}

    def rates(self) -> list[str]:
        rate = self.units / self.elapsed_s
        shares = [seconds / self.elapsed_s for seconds in (self.taken_s["event loop"], self.loop_waited_s)]
        p50, p99, _, samples = report.Summary.cells(report.Summary.of(self.health.latencies_ms))
        numbers = map(report.number, (rate, rate / self.bare_per_s, self.batch_units))
        return [self.name, *numbers, *(f"{share:.0%}" for share in shares), p50, p99, samples]

    def taken(self) -> list[str]:
        each = [1e3 * self.taken_s[taker] / self.units for taker in _TAKERS]
        plain = [1e3 * (psutil.cpu_count() or 1) / per_s for per_s in (self.such_batches_per_s, self.bare_per_s)]
        return [self.name, *map(report.number, (*each, sum(each), *plain))]


def run(options: Options, *, rounds: int, seconds: float) -> None:
    """Measure, print and record: every load once a round, then the plain loop."""
    cells = [Cell(scenario, clients) for scenario, numbers in CLIENTS.items() for clients in numbers]
    settings = {"options": options, "rounds": rounds, "seconds": seconds, "loads": {s: SCENARIOS[s] for s in CLIENTS}}
    with (
        report.recording("cores", settings) as record,
        report.progress("cores", (rounds + 1) * len(cells)) as bar,
        clip_folder() as clip,
    ):
        for inputs in (Inputs.texts(TextSource(options.model)), Inputs.images(clip)):
            served = replace(options, model=str(inputs.folder))
            own = [cell for cell in cells if cell.scenario in (inputs.encoded_images or inputs.lists)]
            with serving(served.serve_command()) as server:
                record.results["images" if inputs.encoded_images else "texts"] = server.card()
                for _ in range(rounds):
                    for cell in own:
                        _measure(server, inputs, cell, seconds)
                        bar.advance(bar.task_ids[0])
            with worker(partial(BareLoop, served)) as loop:
                for cell in own:
                    _measure_bare(loop, inputs, cell, seconds)
                    bar.advance(bar.task_ids[0])
        record.results["cells"] = [cell.result() for cell in cells]
    report.show_table("Rates", RATE_COLUMNS, [cell.rates() for cell in cells], RATE_NOTE)
    report.show_table("Time of the cores", TAKEN_COLUMNS, [cell.taken() for cell in cells], TAKEN_NOTE)


def _measure(server: Server, inputs: Inputs, cell: Cell, seconds: float) -> None:
    requests = inputs.requests(OURS, cell.scenario)
    with (
        worker(partial(pinned, partial(LoadGenerator, server.port, requests))) as generate,
        worker(partial(pinned, partial(HealthProbe, server.port))) as probe,
    ):
        generate(Load(clients=cell.clients, seconds=min(1.0, seconds), patience_s=PATIENCE_S))
        counted = ("staged_pool_device_items_total", "staged_pool_batches_total")
        before = [server.total(name) for name in counted]
        taken, waited_s = _taken(server), threads_of(server.process.pid)[1]
        generate.begin(Load(clients=cell.clients, seconds=seconds, patience_s=PATIENCE_S))
        cell.health.add(probe(seconds))
        outcome = generate.end()
        for taker, seconds_so_far in _taken(server).items():
            cell.taken_s[taker] += seconds_so_far - taken[taker]
        cell.loop_waited_s += threads_of(server.process.pid)[1] - waited_s
        device_units, batches = (server.total(name) - past for name, past in zip(counted, before, strict=True))
    cell.units += len(outcome.latencies_ms) * UNITS[cell.scenario]
    cell.elapsed_s += outcome.elapsed_s
    cell.device_units += device_units
    cell.batches += batches


def _measure_bare(loop: Worker[BareLoad, Rate], inputs: Inputs, cell: Cell, seconds: float) -> None:
    units = UNITS[cell.scenario]

    def per_s(at_once: int | None) -> float:
        rate = loop(inputs.bare_load(cell.scenario, seconds, at_once))
        return rate.groups * units / rate.elapsed_s

    cell.bare_per_s = per_s(None)
    cell.such_batches_per_s = per_s(max(1, round(cell.batch_units / units)))


def _taken(server: Server) -> Mapping[str, float]:
    """Return the CPU time so far by consumer, in seconds."""
    taken, _ = threads_of(server.process.pid)
    times = psutil.cpu_times()
    ours_s, others_s = report.own_s(), report.others_s()
    taken["clients"] = ours_s - sum(taken.values())
    taken["others"] = others_s + times.irq + times.softirq + times.steal
    taken["idle"] = times.idle + times.iowait
    return taken


def threads_of(pid: int) -> tuple[dict[str, float], float]:
    """Return a server's CPU time by consumer, and its event loop's wait for a core.

    Both are in seconds since the start of the process.

    Args:
        pid: Id of the server's process, whose main thread runs the event loop.
    """
    ran_s = defaultdict[str, float](float)
    waited_s = 0.0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        ran_ns, waited_ns, _ = map(int, (thread / "schedstat").read_text().split())
        name = (thread / "comm").read_text().strip().rstrip("0123456789 ")
        whose = _GROUPS.get(name, "other threads")
        if thread.name == str(pid):
            whose, waited_s = "event loop", waited_ns / 1e9
        ran_s[whose] += ran_ns / 1e9
    return ran_s, waited_s
