"""Measurement of the unit costs: CPU time of the threads of real servers, of forwards, and bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from perf.cost.cores import threads_of
from perf.scale.costs import UnitCosts
from perf.scale.forwards import Batches, Forwards
from perf.scale.line_bytes import LineBytes
from perf.scale.linear import Feature, Fit, Work, fit
from perf.tools import report
from perf.tools.client import Connection
from perf.tools.load import Load, LoadGenerator
from perf.tools.report import number
from perf.tools.servers import START_TIMEOUT_S, Options, Server, family, serving
from perf.tools.texts import Shape, TextSource, Workload
from perf.tools.workers import Worker, worker
from staged_pool.runtime.config import EngineConfig

CELLS: Final[tuple[tuple[Shape, int], ...]] = (
    ("s1", 1), ("s1", 8), ("s1", 64), ("m8", 1), ("m8", 16), ("x64", 1), ("x64", 8),
)  # fmt: skip
"""Requests and clients of each load. Costs of an event loop depend on both; see `Linear`."""

FORWARDS: Final = ((1, 12), (8, 12), (40, 12), (1, 64), (8, 64), (2, 256), (64, 16))
"""Texts of a forward, and tokens of each."""

WARM_UP_S: Final = 0.7
PATIENCE_S: Final = 60.0
REPORTED_S: Final = 0.7
"""Wait for the sums of `/metrics` in seconds: fronts report twice a second."""

SETTLED_S: Final = 3.0
"""Seconds after its start in which a server may still do work of loading."""
IDLE_S: Final = 2.0
"""Seconds in which an idle server is measured."""

_LOOP: Final[tuple[Feature, ...]] = ("requests", "texts", "batches")
_CALLS: Final[tuple[Feature, ...]] = ("texts", "tokens", "batches")
_BYTES: Final[tuple[Feature, ...]] = ("requests", "texts", "tokens")


@dataclass(frozen=True, slots=True)
class Roles:
    """Processes of a server that do the work."""

    front: int
    """Id of the process that answers HTTP: the front, or the only one."""
    engine: int | None

    @staticmethod
    def of(server: Server) -> Roles:
        """Tell the processes apart: the engine process has used its device threads at load."""
        supervisor, *children = [process.pid for process in family(server.process.pid)]
        if not children:
            return Roles(supervisor, None)
        engine = max(children, key=lambda pid: threads_of(pid)[0]["device"])
        (front,) = [pid for pid in children if pid != engine]
        return Roles(front, engine)


@dataclass(frozen=True, slots=True)
class Used:
    """CPU time in seconds."""

    loop: float
    """Event loop of the front, or of the server of one process."""
    threads: float
    """Threads beside it, without those of a device: they tokenize, and read and write large bodies."""
    engine_loop: float
    """Event loop of the engine process; 0 if there is none."""

    def less(self, other: Used) -> Used:
        """Return the difference to some other time."""
        return Used(self.loop - other.loop, self.threads - other.threads, self.engine_loop - other.engine_loop)

    def times(self, factor: float) -> Used:
        """Return the time times a factor."""
        return Used(self.loop * factor, self.threads * factor, self.engine_loop * factor)

    @staticmethod
    def so_far(roles: Roles) -> Used:
        """Return the CPU time since the start of the processes."""
        front = threads_of(roles.front)[0]
        threads_s = front.get("preprocess", 0.0) + front.get("other threads", 0.0)
        engine_s = 0.0 if roles.engine is None else threads_of(roles.engine)[0]["event loop"]
        return Used(front["event loop"], threads_s, engine_s)


@dataclass(frozen=True, slots=True)
class Cell:
    """One load of one server."""

    shape: Shape
    clients: int
    work: Work
    """`batches` are those of the device."""
    used: Used
    """Without what an idle server takes in that time."""
    client_s: float
    """CPU time of the load generator."""

    def each_s(self) -> float:
        """Return the CPU time of the event loops for one request."""
        return (self.used.loop + self.used.engine_loop) / self.work.requests


def measure(options: Options, *, rounds: int, seconds: float) -> None:
    """Measure all unit costs, print and record them.

    The event loops are measured in servers of a model of one layer, with the tokenizer and the width of the named one:
    there the loops have the cores, and not forwards. Forwards and bytes are those of the named model.

    Args:
        options: Options of the servers.
        rounds: Rounds of each load; the cheapest counts, because other programs only add to CPU time.
        seconds: Seconds of one load.
    """
    source = TextSource(options.model)
    settings = {"options": options, "rounds": rounds, "seconds": seconds, "cells": CELLS}
    with report.recording("scale", settings) as record, TemporaryDirectory(prefix="perf-scale-") as folder:
        width = json.loads((source.folder / "config.json").read_text())["hidden_size"]
        small = replace(options, model=str(_one_layer(Path(folder) / "model", source.folder, width)))
        alone, _ = _measured_server(small, source, fronts=0, rounds=rounds, seconds=seconds)
        cells, memory = _measured_server(small, source, fronts=1, rounds=rounds, seconds=seconds)
        fits = {
            "one_loop": fit([(cell.work, cell.used.loop) for cell in alone], _LOOP),
            "one_preprocess": _of_calls(alone),
            "front_loop": fit([(cell.work, cell.used.loop) for cell in cells], _LOOP),
            "front_preprocess": _of_calls(cells),
            "engine_loop": fit([(cell.work, cell.used.engine_loop) for cell in cells], _LOOP),
            "client": fit([(cell.work, cell.client_s) for cell in [*alone, *cells]], ("requests", "texts")),
        }
        with worker(partial(Forwards, options)) as forwards:
            slots = round(forwards(None))
            fits["cpu_device"] = _of_forwards(forwards, source, rounds, seconds / 4)
        fits |= _of_bytes(options, source)
        costs = UnitCosts(
            **{name: each.cost for name, each in fits.items()},
            front_bytes=memory[0],
            engine_bytes=memory[1],
            width=width,
            cpu_slots=slots,
        )
        record.results["costs"] = asdict(costs)
        record.results["worst_of_fit"] = {name: each.worst for name, each in fits.items()}
        record.results["cells"] = {
            "one process": [asdict(cell) for cell in alone],
            "one front": [asdict(cell) for cell in cells],
        }
        show(fits, memory)


def show(fits: Mapping[str, Fit], memory: tuple[float, float]) -> None:
    """Print the unit costs."""
    rows = []
    for name, each in fits.items():
        in_bytes = name in {"up", "down", "request", "answer"}
        cost = each.cost if in_bytes else each.cost.times(1e6)
        cells = [number(value) for value in (cost.requests, cost.texts, cost.tokens, cost.batches)]
        rows.append([name, "bytes" if in_bytes else "us", *cells, f"{each.worst:.0%}"])
    columns = ("", "unit", "a request", "a text", "a token", "a batch or call", "worst of fit")
    note = (
        f"CPU time of threads; worst of fit: of {len(CELLS)} loads, the one that the sum is furthest from; "
        f"a front takes {memory[0] / 1e6:.0f} MB, the engine process {memory[1] / 1e6:.0f} MB"
    )
    report.show_table("Unit costs", columns, rows, note)


def _one_layer(folder: Path, like: Path, width: int) -> Path:
    """Make a model of one layer with random weights, and the tokenizer of another model."""
    from perf.gpu.models import bert_folder

    return bert_folder(
        folder,
        layers=1,
        width=width,
        heads=width // 32,
        inner=4 * width,
        device="cpu",
        dtype="float32",
        tokenizer=like,
    )


def _measured_server(
    options: Options, source: TextSource, *, fronts: int, rounds: int, seconds: float
) -> tuple[list[Cell], tuple[float, float]]:
    """Return the cells of one server, and the memory of its two processes in bytes."""
    workloads = {shape: source.workload(shape) for shape, _ in CELLS}
    with serving([*options.serve_command(), "--api-servers", str(fronts)]) as server:
        server.card()
        roles = Roles.of(server)
        idle = _idle(roles)
        cells = []
        with report.progress("scale", len(CELLS)) as bar:
            for shape, clients in CELLS:
                measured = _cells(server, idle, workloads[shape], clients=clients, rounds=rounds, seconds=seconds)
                cells.append(min(measured, key=Cell.each_s))
                bar.advance(bar.task_ids[0])
        own = {process.pid: float(process.memory_full_info().pss) for process in family(server.process.pid)}
        return cells, (own[roles.front], 0.0 if roles.engine is None else own[roles.engine])


def _cells(server: Server, idle: Used, workload: Workload, *, clients: int, rounds: int, seconds: float) -> list[Cell]:
    roles, cells = Roles.of(server), []
    with worker(partial(LoadGenerator, server.port, workload.requests)) as generate:
        generate(Load(clients=clients, seconds=WARM_UP_S, patience_s=PATIENCE_S))
        for _ in range(rounds):
            batches, before, began = _batches(server), Used.so_far(roles), time.perf_counter()
            outcome = generate(Load(clients=clients, seconds=seconds, patience_s=PATIENCE_S))
            elapsed_s = time.perf_counter() - began
            used = Used.so_far(roles).less(before).less(idle.times(elapsed_s))
            requests = len(outcome.latencies_ms)
            texts = requests * workload.texts_per_request
            work = Work(requests, texts, texts * workload.mean_tokens, _batches(server) - batches)
            cells.append(Cell(workload.shape, clients, work, used, outcome.client_cpu_s))
    return cells


def _idle(roles: Roles) -> Used:
    """Return what a server takes in a second without requests."""
    time.sleep(SETTLED_S)
    before, began = Used.so_far(roles), time.perf_counter()
    time.sleep(IDLE_S)
    return Used.so_far(roles).less(before).times(1.0 / (time.perf_counter() - began))


def _batches(server: Server) -> float:
    """Return the batches so far."""
    time.sleep(REPORTED_S)
    return server.total("staged_pool_batches_total")


def _of_calls(cells: Sequence[Cell]) -> Fit:
    """Fit the cost of preprocess, with a call for each list of a request."""
    chunk = EngineConfig().chunk_items
    calls = []
    for cell in cells:
        lists = cell.work.requests * ceil(cell.work.texts / cell.work.requests / chunk)
        calls.append((Work(0.0, cell.work.texts, cell.work.tokens, lists), cell.used.threads))
    return fit(calls, _CALLS)


def _of_forwards(forwards: Worker[Batches | None, float], source: TextSource, rounds: int, seconds: float) -> Fit:
    measured = []
    for texts, tokens in FORWARDS:
        (given,) = source.equal_lists(requests=1, texts=texts, tokens=tokens)
        cost_s = min(forwards(Batches(given, seconds)) for _ in range(rounds))
        measured.append((Work(0.0, texts, texts * tokens, 1.0), cost_s))
    return fit(measured, _CALLS)


def _of_bytes(options: Options, source: TextSource) -> dict[str, Fit]:
    """Return the bytes on the line, and those over HTTP."""
    shapes: tuple[Shape, ...] = ("s1", "m8", "x64")
    lists = [source.lists(shape)[0] for shape in shapes]
    works = [Work(1.0, len(texts), sum(map(source.tokens_of, texts)), 0.0) for texts in lists]
    with worker(partial(LineBytes, options)) as count:
        line = count(lists)
    asked, answered = [], []
    with serving(options.serve_command()) as server:
        server.card()
        connection = Connection(server.port, timeout_s=START_TIMEOUT_S)
        for shape, work in zip(shapes, works, strict=True):
            request = source.workload(shape).requests[0]
            reply = connection.exchange(request)
            asked.append((work, float(len(request))))
            answered.append((work, float(len(reply.head) + len(reply.body))))
        connection.close()
    return {
        "up": fit([(work, up) for work, (up, _) in zip(works, line, strict=True)], _BYTES),
        "down": fit([(work, down) for work, (_, down) in zip(works, line, strict=True)], _BYTES),
        "request": fit(asked, _BYTES),
        "answer": fit(answered, _BYTES),
    }
