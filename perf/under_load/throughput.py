"""Throughput of a server in closed loops, by number of clients and kind of requests."""

from __future__ import annotations

from functools import partial
from typing import Final

from perf.tools import report
from perf.tools.load import HealthProbe, Load, LoadGenerator
from perf.tools.servers import Options, serving
from perf.tools.texts import SHAPES, Shape, TextSource
from perf.tools.workers import worker
from perf.under_load.flood import COLUMNS, NOTE, Flood

LOADS: Final[tuple[Shape, ...]] = ("s1", "m8", "x64")
CLIENTS: Final = (1, 4, 16, 64)
WARM_UP_REQUESTS: Final = 8
PATIENCE_S: Final = 60.0


def run(options: Options, *, seconds: float) -> None:
    """Measure, print and record.

    A cell ends when all requests sent within its `seconds` are answered; all of them count.
    """
    source = TextSource(options.model)
    settings = {"options": options, "seconds": seconds, "clients": CLIENTS, "loads": {s: SHAPES[s] for s in LOADS}}
    rows: list[list[str]] = []
    cells: list[dict[str, object]] = []
    with report.recording("throughput", settings) as record, serving(options.serve_command()) as server:
        record.results["model"] = server.card()
        with (
            worker(partial(HealthProbe, server.port)) as probe,
            report.progress("throughput", len(LOADS) * len(CLIENTS)) as bar,
        ):
            for shape in LOADS:
                workload = source.workload(shape)
                with worker(partial(LoadGenerator, server.port, workload.requests)) as generate:
                    generate(Load(clients=1, max_requests=WARM_UP_REQUESTS))
                    for clients in CLIENTS:
                        flood = Flood(workload.texts_per_request)
                        flood.run(generate, probe, Load(clients=clients, seconds=seconds, patience_s=PATIENCE_S))
                        rows.append([f"{shape}, {clients}", *flood.row()])
                        cells.append({"load": shape, "clients": clients, **flood.result()})
                        bar.advance(bar.task_ids[0])
        record.results["cells"] = cells
        shapes = "; ".join(f"{shape}: {SHAPES[shape]}" for shape in LOADS)
        report.show_table("Closed loop", ["load, clients", *COLUMNS], rows, f"{NOTE}; {shapes}")
