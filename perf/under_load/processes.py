"""Cost of fronts: one process beside one front and beside several, in turns, on one machine."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Final

from perf.tools import report
from perf.tools.load import Load, LoadGenerator
from perf.tools.servers import Options, Server, family, serving
from perf.tools.texts import SHAPES, Shape, TextSource
from perf.tools.workers import worker

LOADS: Final[tuple[tuple[Shape, int], ...]] = (("s1", 1), ("s1", 32), ("m8", 16), ("x64", 8))
"""Kind of requests, and number of clients."""

WARM_UP_REQUESTS: Final = 8
PATIENCE_S: Final = 60.0


def run(options: Options, *, fronts: tuple[int, ...], rounds: int, seconds: float) -> None:
    """Measure, print and record.

    All servers run all the time. Each round measures each of them once, while the others are idle.

    Args:
        options: Options of the servers.
        fronts: Numbers of fronts; 0 is a server of one process.
        rounds: Rounds of each load.
        seconds: Seconds of each cell.
    """
    source = TextSource(options.model)
    settings = {"options": options, "fronts": fronts, "rounds": rounds, "seconds": seconds, "loads": LOADS}
    with report.recording("processes", settings) as record, ExitStack() as stack:
        servers = {
            count: stack.enter_context(serving([*options.serve_command(), "--api-servers", str(count)]))
            for count in fronts
        }
        for server in servers.values():
            record.results["model"] = server.card()
        rows: list[list[str]] = []
        cells: list[dict[str, object]] = []
        for shape, clients in LOADS:
            workload = source.workload(shape)
            measured = _measured(servers, workload.requests, clients, rounds=rounds, seconds=seconds)
            for count, each in measured.items():
                beside = [own["rate"] / one["rate"] for own, one in zip(each, measured[fronts[0]], strict=True)]
                middle = {name: median(values[name] for values in each) for name in each[0]}
                cells.append({"load": shape, "clients": clients, "fronts": count, "ratio": median(beside), **middle})
                rows.append([
                    f"{shape}, {clients}", str(count), f"{middle['rate'] * workload.texts_per_request:,.0f}",
                    f"{middle['p50']:.2f}", f"{middle['p99']:.2f}", f"{middle['cpu_us']:,.0f}", f"{median(beside):.2f}",
                ])  # fmt: skip
        record.results["cells"] = cells
        columns = ("load, clients", "fronts", "texts/s", "p50 ms", "p99 ms", "CPU us a request", "of the first")
        shapes = "; ".join(f"{shape}: {SHAPES[shape]}" for shape, _ in LOADS)
        report.show_table("Processes", columns, rows, f"0 fronts: one process; medians of {rounds} rounds; {shapes}")


def _measured(
    servers: dict[int, Server], requests: tuple[bytes, ...], clients: int, *, rounds: int, seconds: float
) -> dict[int, list[dict[str, float]]]:
    """Return rate, latencies and CPU time of each round, by number of fronts."""
    measured: dict[int, list[dict[str, float]]] = {count: [] for count in servers}
    for _ in range(rounds):
        for count, server in servers.items():
            # New connections: those of the last round have been idle for too long.
            with worker(partial(LoadGenerator, server.port, requests)) as generate:
                generate(Load(clients=clients, max_requests=WARM_UP_REQUESTS))
                before_s = _cpu_s(server)
                outcome = generate(Load(clients=clients, seconds=seconds, patience_s=PATIENCE_S))
                used_s = _cpu_s(server) - before_s
            latencies = sorted(outcome.latencies_ms)
            measured[count].append({
                "rate": outcome.rate, "p50": median(latencies), "p99": latencies[int(0.99 * len(latencies))],
                "cpu_us": used_s * 1e6 / len(latencies),
            })  # fmt: skip
    return measured


def _cpu_s(server: Server) -> float:
    """Return the CPU time of all processes of a server."""
    times = [process.cpu_times() for process in family(server.process.pid)]
    return sum(each.user + each.system for each in times)
