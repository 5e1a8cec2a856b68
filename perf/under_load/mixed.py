"""Mixed overload: texts, images and requests of several images at a multiple of capacity, with a server's defaults.

Clients time out after ten seconds. The target is that none does: a request that cannot be answered in time is rejected
at admission, before its body is decoded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from perf.tools import report
from perf.tools.client import post
from perf.tools.jpegs import clip_folder, jpeg, score_request
from perf.tools.load import Load, closed_loop_rate
from perf.tools.openloop import Arrivals, ArrivalsOutcome, OpenLoop
from perf.tools.report import number
from perf.tools.servers import MAX_CONNECTIONS, Options, serving
from perf.tools.texts import TextSource, embeddings_body
from perf.tools.workers import worker

TIMEOUT_S: Final = 10.0
IMAGES_PER_REQUEST: Final = 8
SHARES: Final = {"text": 40, "image": 30, "images": 30}
"""Requests of each kind, of a hundred."""
TEXT_TOKENS: Final = 64
CLIENTS: Final = 8
SEED: Final = 1
COLUMNS: Final = (
    "load", "offered/s", "answered", "rejected", "time-outs", "other", "200 p50 ms", "p99", "429 p50 ms", "p99",
)  # fmt: skip


def run(options: Options, *, seconds: float, rounds: int, factor: float) -> None:
    """Measure, print and record.

    Args:
        options: Options of the server; the model is generated.
        seconds: Length of one round.
        rounds: Number of rounds.
        factor: Offered load as a multiple of the closed-loop rate.
    """
    settings = {"options": options, "seconds": seconds, "rounds": rounds, "factor": factor, "shares": SHARES}
    with report.recording("mixed", settings) as record, clip_folder() as folder:
        served = replace(options, model=str(folder))
        requests = _requests(options)
        with serving([*served.serve_command(), "--max-connections", str(MAX_CONNECTIONS)]) as server:
            record.results["model"] = server.card()
            closed = Load(clients=CLIENTS, seconds=seconds, patience_s=TIMEOUT_S)
            capacity = closed_loop_rate(server.port, requests, closed)
            outcome = ArrivalsOutcome()
            with worker(partial(OpenLoop, server.port, requests)) as offer:
                for round_number in range(rounds):
                    arrivals = Arrivals(
                        rate=factor * capacity,
                        seconds=seconds,
                        seed=SEED + round_number,
                        timeout_s=TIMEOUT_S,
                        max_connections=MAX_CONNECTIONS,
                    )
                    outcome.add(offer(arrivals))
        record.results |= {"capacity_per_s": capacity, "outcome": outcome}
        rows = [_row(f"{factor:g} x {number(capacity)}/s", factor * capacity, outcome)]
        report.show_table("Texts, images and requests of 8 images at once", COLUMNS, rows, "default settings")


def _requests(options: Options) -> tuple[bytes, ...]:
    """Return a hundred requests in random order."""
    source, lottery = TextSource(options.model), random.Random(SEED)
    texts = [
        post("/v1/embeddings", embeddings_body([source.text(TEXT_TOKENS, lottery)])) for _ in range(SHARES["text"])
    ]
    images = [jpeg("vga", seed) for seed in range(64)]
    single = [score_request("a small red image", [image]) for image in images[: SHARES["image"]]]
    several = [
        score_request("a small red image", random.Random(seed).sample(images, IMAGES_PER_REQUEST))
        for seed in range(SHARES["images"])
    ]
    mixed = [*texts, *single, *several]
    lottery.shuffle(mixed)
    return tuple(mixed)


def _row(name: str, offered_per_s: float, outcome: ArrivalsOutcome) -> Sequence[str]:
    accepted, rejected = report.Summary.of(outcome.accepted_ms), report.Summary.of(outcome.rejected_ms)
    other = sum(outcome.other_statuses.values()) + outcome.broken + outcome.not_sent
    return [
        name,
        number(offered_per_s),
        str(len(outcome.accepted_ms)),
        str(len(outcome.rejected_ms)),
        f"{outcome.timeouts} ({100 * outcome.timeouts / max(1, outcome.offered):.1f} %)",
        str(other),
        *(["", ""] if accepted is None else [number(accepted.p50), number(accepted.p99)]),
        *(["", ""] if rejected is None else [number(rejected.p50), number(rejected.p99)]),
    ]
