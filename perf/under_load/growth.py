"""Time and memory of a text, by texts in a request and by clients."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import psutil

from perf.tools import report
from perf.tools.client import post
from perf.tools.load import Load, LoadGenerator
from perf.tools.servers import Options, Server, serving
from perf.tools.texts import TextSource, embeddings_body
from perf.tools.workers import worker

TOKENS: Final = 64
"""Tokens of each text."""
SIZES: Final = (1, 8, 64, 512, 2048)
"""Texts of a request."""
OUTSTANDING: Final = 64
"""Minimum texts in flight, in two requests or more, to keep the device busy."""
CLIENTS: Final = (1, 4, 16, 64, 256, 512)
TEXTS: Final = 4
"""Texts of a request in the series by clients."""
DIFFERENT: Final = 8
"""Different requests of each size."""
PATIENCE_S: Final = 120.0
TARGET_DELAY_S: Final = 300.0
"""Target delay of the servers in seconds, so high that nothing is rejected."""
SAMPLE_S: Final = 0.05
FLAT: Final = 1.1
"""Target ratio of the slowest time of a text to the fastest."""

COLUMNS: Final = ("texts a request", "clients", "texts/s", "ms a text", "of the quickest", "largest RSS, MB")


@dataclass(slots=True)
class Cell:
    """Requests of one size from a number of clients, with the figures of each round."""

    texts: int
    clients: int
    texts_per_s: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    """Largest RSS of each round."""

    @property
    def ms_per_text(self) -> float:
        return 1e3 / statistics.median(self.texts_per_s)

    def row(self, quickest_ms: float) -> list[str]:
        ms = self.ms_per_text
        return [
            str(self.texts),
            str(self.clients),
            report.number(1e3 / ms),
            report.number(ms),
            report.number(ms / quickest_ms),
            report.number(max(self.rss_mb)),
        ]


def run(options: Options, *, rounds: int, seconds: float) -> None:
    """Measure, print and record.

    Each round starts one server for each series, and runs the series from the smallest to the largest cell. So the
    memory of a server is that of the loads so far.
    """
    source = TextSource(options.model)
    by_size = [Cell(size, max(2, OUTSTANDING // size)) for size in SIZES]
    by_clients = [Cell(TEXTS, clients) for clients in CLIENTS]
    settings = {"options": options, "rounds": rounds, "seconds": seconds, "tokens": TOKENS}
    with (
        report.recording("growth", settings) as record,
        report.progress("growth", rounds * (len(by_size) + len(by_clients))) as bar,
    ):
        for _ in range(rounds):
            for cells in (by_size, by_clients):
                with serving([*options.serve_command(), "--target-delay", str(TARGET_DELAY_S)]) as server:
                    record.results["model"] = server.card()
                    for cell in cells:
                        _measure(server, source, cell, seconds)
                        bar.advance(bar.task_ids[0])
    for what, cells in (("texts a request", by_size), ("clients", by_clients)):
        quickest_ms = min(cell.ms_per_text for cell in cells)
        report.show_table(f"By {what}", COLUMNS, [cell.row(quickest_ms) for cell in cells])
        record.results[what] = cells
        slowest_ms = max(cell.ms_per_text for cell in cells)
        record.show_target(f"slowest time of a text, by {what}", slowest_ms / quickest_ms, FLAT, "times the quickest")


def _measure(server: Server, source: TextSource, cell: Cell, seconds: float) -> None:
    requests = tuple(post("/v1/embeddings", embeddings_body(texts)) for texts in _lists(source, cell.texts))
    with worker(partial(LoadGenerator, server.port, requests)) as generate:
        generate(Load(clients=cell.clients, max_requests=cell.clients))
        with _largest_rss(psutil.Process(server.process.pid)) as sizes_mb:
            outcome = generate(Load(clients=cell.clients, seconds=seconds, patience_s=PATIENCE_S))
    if outcome.rejected or outcome.unanswered:
        lost = f"{outcome.rejected} requests were rejected and {outcome.unanswered} not answered"
        raise RuntimeError(f"{cell.clients} clients with {cell.texts} texts each: {lost}")
    cell.texts_per_s.append(outcome.rate * cell.texts)
    cell.rss_mb.append(max(sizes_mb))


def _lists(source: TextSource, size: int) -> list[list[str]]:
    return source.equal_lists(requests=max(DIFFERENT, 2 * OUTSTANDING // size), texts=size, tokens=TOKENS)


@contextmanager
def _largest_rss(process: psutil.Process) -> Iterator[list[float]]:
    """Sample the RSS of a process during the block, in MB."""
    sizes_mb: list[float] = []
    over = threading.Event()

    def look() -> None:
        while True:
            sizes_mb.append(process.memory_info().rss / 1e6)
            if over.wait(SAMPLE_S):
                return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield sizes_mb
    finally:
        over.set()
        thread.join()
