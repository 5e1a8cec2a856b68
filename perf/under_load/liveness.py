"""Latency of `/health` under a flood of texts, compared with a naive FastAPI handler."""

from __future__ import annotations

import sys
from functools import partial
from typing import Final

from perf.tools import report
from perf.tools.load import HealthProbe, Load, LoadGenerator
from perf.tools.servers import Card, Options, Server, serving
from perf.tools.texts import Shape, TextSource, Workload
from perf.tools.workers import worker
from perf.under_load.flood import COLUMNS, NOTE, Flood

SHAPE: Final[Shape] = "x64"
WARM_UP_REQUESTS: Final = 4


def run(options: Options, *, rounds: int, seconds: float, clients: int) -> None:
    """Measure, print and record.

    Rounds alternate between the two, each on a new server, so that neither shares the cores with the other or with the
    rest of an earlier round. A round does not wait for missing answers.
    """
    source = TextSource(options.model)
    workload = source.workload(SHAPE)
    settings = {"options": options, "rounds": rounds, "seconds": seconds, "clients": clients,
                "texts_per_request": workload.texts_per_request, "mean_tokens": workload.mean_tokens}  # fmt: skip
    staged, naive = Flood(workload.texts_per_request), Flood(workload.texts_per_request)
    load = Load(clients=clients, seconds=seconds)
    with report.recording("liveness", settings) as record, report.progress("liveness", 2 * rounds) as bar:
        for _ in range(rounds):
            with serving(options.serve_command()) as server:
                card = server.card()
                _round(server, staged, workload, load)
            bar.advance(bar.task_ids[0])
            with serving(_naive_command(source, card)) as server:
                server.wait_ok("/health")
                _round(server, naive, workload, load)
            bar.advance(bar.task_ids[0])
            record.results["model"] = card
        floods = {"staged-pool": staged, "FastAPI, inline": naive}
        record.results |= {name: flood.result() for name, flood in floods.items()}
        rows = [[name, *flood.row()] for name, flood in floods.items()]
        note = f"{NOTE}; unanswered: requests without an answer at the end of their round, left out of the figures"
        title = f"While {clients} clients send {workload.texts_per_request} texts a request"
        report.show_table(title, ["server", *COLUMNS], rows, note)


def _naive_command(source: TextSource, card: Card) -> list[str]:
    same = {"--dtype": card.dtype, "--torch-threads": card.torch_threads, "--max-tokens": card.max_tokens}
    settings = [str(part) for pair in same.items() for part in pair]
    return [sys.executable, "-m", "perf.contenders.naive", "--folder", str(source.folder), *settings]


def _round(server: Server, flood: Flood, workload: Workload, load: Load) -> None:
    with (
        worker(partial(LoadGenerator, server.port, workload.requests)) as generate,
        worker(partial(HealthProbe, server.port)) as probe,
    ):
        generate(Load(clients=1, max_requests=WARM_UP_REQUESTS))
        flood.run(generate, probe, load)
