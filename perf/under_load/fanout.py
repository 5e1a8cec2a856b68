"""Latency of single texts while another client ranks 1,000 documents."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Final

import numpy as np

from perf.tools import report
from perf.tools.client import post
from perf.tools.load import Load, LoadGenerator
from perf.tools.servers import Options, serving
from perf.tools.texts import TextSource
from perf.tools.workers import worker

DOCUMENTS: Final = 1000
DOCUMENT_TOKENS: Final = 64
WARM_UP_REQUESTS: Final = 32
PATIENCE_S: Final = 60.0
SEED: Final = 3

RAISED: Final = 2.0
"""Target ratio of the p99 of single texts beside rankings to that alone."""

COLUMNS: Final = ("single texts", "answered/s", "p50 ms", "p99", "max", "n", "rankings", "of a ranking p50 s")


def run(options: Options, *, rounds: int, seconds: float, clients: int) -> None:
    """Measure, print and record: alternating rounds of single texts alone and beside rankings."""
    source = TextSource(options.model)
    rng = random.Random(SEED)
    documents = [source.text(DOCUMENT_TOKENS, rng) for _ in range(DOCUMENTS)]
    ranking = post("/rerank", json.dumps({"query": source.text(12, rng), "documents": documents, "top_n": 10}).encode())
    singles = source.workload("s1").requests
    settings = {"options": options, "rounds": rounds, "seconds": seconds, "clients": clients, "documents": DOCUMENTS,
                "document_tokens": DOCUMENT_TOKENS}  # fmt: skip
    alone: list[float] = []
    beside: list[float] = []
    rankings: list[float] = []
    rates: dict[str, list[float]] = {"alone": [], "beside": []}
    with report.recording("fanout", settings) as record, serving(options.serve_command()) as server:
        record.results["model"] = server.card()
        with (
            worker(partial(LoadGenerator, server.port, singles)) as small,
            worker(partial(LoadGenerator, server.port, (ranking,))) as large,
            report.progress("fanout", 2 * rounds) as bar,
        ):
            small(Load(clients=clients, max_requests=WARM_UP_REQUESTS))
            large(Load(clients=1, max_requests=1, seconds=PATIENCE_S, patience_s=PATIENCE_S))
            load = Load(clients=clients, seconds=seconds, patience_s=PATIENCE_S)
            for _ in range(rounds):
                outcome = small(load)
                alone += outcome.latencies_ms
                rates["alone"].append(outcome.rate)
                bar.advance(bar.task_ids[0])
                large.begin(Load(clients=1, seconds=seconds, patience_s=PATIENCE_S))
                outcome = small(load)
                beside += outcome.latencies_ms
                rates["beside"].append(outcome.rate)
                rankings += large.end().latencies_ms
                bar.advance(bar.task_ids[0])
        quiet, busy, ranked = (report.Summary.of(values) for values in (alone, beside, rankings))
        if quiet is None or busy is None or ranked is None:
            raise RuntimeError(f"no text or no ranking was answered within {seconds:g} s: take a longer --seconds")
        rows = [
            ["alone", report.number(float(np.median(rates["alone"]))), *report.Summary.cells(quiet), "-", "-"],
            ["beside rankings", report.number(float(np.median(rates["beside"]))), *report.Summary.cells(busy),
             str(ranked.samples), report.number(ranked.p50 / 1e3)],
        ]  # fmt: skip
        report.show_table(
            f"{clients} clients with one text of 12 tokens; {DOCUMENTS} documents of {DOCUMENT_TOKENS} tokens",
            COLUMNS,
            rows,
        )
        record.results |= {"alone_ms": quiet, "beside_ms": busy, "ranking_ms": ranked, "per_s": rates}
        record.show_target("p99 of single texts beside rankings, times that alone", busy.p99 / quiet.p99, RAISED, "x")
