"""Matrix of threads, processes and fronts, by threads of torch: which of them helps texts, images and Python code?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Final

from perf.tools import report
from perf.tools.jpegs import clip_folder, embedding_request, jpeg
from perf.tools.load import HealthProbe, Load, LoadGenerator
from perf.tools.servers import Options, Server, serving
from perf.tools.texts import TextSource
from perf.tools.workers import worker
from perf.under_load.liveness_images import burning

PLACES: Final[dict[str, tuple[str, ...]]] = {
    "threads": ("--preprocess-workers", "thread"),
    "processes": ("--preprocess-workers", "process"),
    "2 fronts, threads": ("--preprocess-workers", "thread", "--api-servers", "2"),
    "2 fronts, processes": ("--preprocess-workers", "process", "--api-servers", "2"),
}
"""Flags of each place of preprocess, by its name. The first is what the others are compared with."""

TORCH_THREADS: Final = (1, 2)
IMAGES: Final = 16
LOOP_S: Final = 0.2
"""Seconds that the image processor in Python computes for each image."""
WARM_UP_REQUESTS: Final = 16
PATIENCE_S: Final = 60.0

GAIN: Final = 1.6
"""Wanted ratio of items/s, of two fronts to one process, for a processor in Python."""
HEALTH_P99_MS: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Work:
    """One kind of requests."""

    name: str
    flags: tuple[str, ...]
    requests: tuple[bytes, ...]
    items: int
    """Items of one request."""
    clients: int


def run(options: Options, *, rounds: int, seconds: float, only: str) -> None:
    """Measure, print and record.

    The servers of one kind of requests and one number of torch threads run at the same time, and are measured in
    turns.

    Args:
        options: Options of the servers. Its model is for texts.
        rounds: Rounds of each cell.
        seconds: Seconds of a cell in one round.
        only: Part of the names of the kinds of requests to measure.
    """
    with report.recording("matrix", {"options": options, "rounds": rounds, "seconds": seconds, "only": only}) as record:
        rows: list[list[str]] = []
        cells: list[dict[str, object]] = []
        with _works(options) as works:
            for work in (each for each in works if only in each.name):
                for threads in TORCH_THREADS:
                    found = _cells(replace(options, torch_threads=threads), work, rounds=rounds, seconds=seconds)
                    for place, (rate, ratio, p99_ms) in found.items():
                        cells.append({
                            "work": work.name, "torch_threads": threads, "place": place, "items_per_s": rate,
                            "ratio": ratio, "health_p99_ms": p99_ms,
                        })  # fmt: skip
                        rows.append([work.name, str(threads), place, f"{rate:,.1f}", f"{ratio:.2f}", f"{p99_ms:.1f}"])
        record.results["cells"] = cells
        columns = ("work", "torch threads", "preprocess in", "items/s", "of threads", "/health p99 ms")
        report.show_table("Places of preprocess", columns, rows, f"medians of {rounds} rounds")
        loops = [
            cell for cell in cells if cell["work"] == "images, Python loop" and cell["place"] == "2 fronts, processes"
        ]
        if not loops:
            return
        best = max(loops, key=lambda cell: float(str(cell["ratio"])))
        record.show_target(
            "items/s of 2 fronts, Python loop", float(str(best["ratio"])), GAIN, "of one process", at_least=True
        )
        record.show_target(
            "/health p99 of 2 fronts, Python loop", float(str(best["health_p99_ms"])), HEALTH_P99_MS, "ms"
        )


@contextmanager
def _works(options: Options) -> Iterator[Sequence[_Work]]:
    texts = TextSource(options.model).workload("m8")
    images = tuple(embedding_request([jpeg("vga", seed)]) for seed in range(IMAGES))
    model = () if options.model is None else ("--model", options.model)
    with clip_folder() as clip, clip_folder(layers=1) as small, burning(small, LOOP_S) as loop:
        yield (
            _Work("texts, 8 each", model, texts.requests, texts.texts_per_request, 16),
            _Work("images", ("--model", str(clip)), images, 1, 16),
            _Work("images, exact path", ("--model", str(clip), "--image-path", "exact"), images, 1, 16),
            _Work("images, Python loop", ("--model", str(loop), "--trust-remote-code"), images, 1, 16),
        )


def _cells(options: Options, work: _Work, *, rounds: int, seconds: float) -> dict[str, tuple[float, float, float]]:
    """Return items/s, their ratio to the first place, and the p99 of /health, by place."""
    command = [*replace(options, model=None).serve_command(), *work.flags]
    with ExitStack() as stack:
        servers = {place: stack.enter_context(serving([*command, *flags])) for place, flags in PLACES.items()}
        for server in servers.values():
            server.card()
        rates: dict[str, list[float]] = {place: [] for place in servers}
        health: dict[str, list[float]] = {place: [] for place in servers}
        for _ in range(rounds):
            for place, server in servers.items():
                rate, latencies_ms = _measured(server, work, seconds)
                rates[place].append(rate * work.items)
                health[place] += latencies_ms
    first = rates[next(iter(rates))]
    return {
        place: (
            median(each),
            median(own / one for own, one in zip(each, first, strict=True)),
            sorted(health[place])[int(0.99 * len(health[place]))],
        )
        for place, each in rates.items()
    }


def _measured(server: Server, work: _Work, seconds: float) -> tuple[float, list[float]]:
    """Return the requests a second, and the latencies of health checks beside them."""
    with (
        worker(partial(LoadGenerator, server.port, work.requests)) as generate,
        worker(partial(HealthProbe, server.port)) as probe,
    ):
        generate(Load(clients=work.clients, max_requests=WARM_UP_REQUESTS))
        generate.begin(Load(clients=work.clients, seconds=seconds, patience_s=PATIENCE_S))
        beside = probe(seconds)
        return generate.end().rate, beside.latencies_ms
