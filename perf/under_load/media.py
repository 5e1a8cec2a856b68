"""Texts, images and videos at once, below and above capacity: answers, errors, and what the texts notice.

A server with default settings serves three models of real layouts and tiny sizes. So decoding is the work, as it is
beside a fast device. Requests arrive at random times, and clients leave after ten seconds.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from perf.tools import report
from perf.tools.client import post
from perf.tools.jpegs import jpeg
from perf.tools.load import HealthProbe, Load, LoadGenerator, ProbeOutcome
from perf.tools.openloop import Arrivals, ArrivalsOutcome, OpenLoop
from perf.tools.report import Summary, number
from perf.tools.servers import MAX_CONNECTIONS, Options, Server, serving
from perf.tools.videos import mp4
from perf.tools.workers import Worker, worker

KINDS: Final = {"text": "bert-mean", "image": "clip", "video": "qwen2-vl"}
"""Kinds of requests, and the tiny model of the tests that each is for."""
SHARES: Final = {"text": 40, "image": 30, "video": 30}
"""Requests of each kind, of a hundred."""
FACTORS: Final = (0.5, 2.0)
"""Offered load as multiples of the closed-loop rate."""
TIMEOUT_S: Final = 10.0
TEXT_WORDS: Final = (4, 30)
VIDEO_S: Final = (4.0, 6.0, 10.0)
"""Lengths of the videos in seconds; the model reads two frames of each second."""
CLIENTS: Final = 8
SEED: Final = 1
IDLE_RATE: Final = 20.0
"""Texts a second of an idle server."""

SLOWER: Final = 2.0
HEALTH_MS: Final = 10.0

COLUMNS: Final = (
    "load", "kind", "offered", "200", "429", "time-outs", "other errors", "200 p50 ms", "p99", "max",
)  # fmt: skip


def run(options: Options, *, seconds: float, rounds: int) -> None:
    """Measure, print and record.

    Each round has texts alone, then each load with all kinds, on the same server.

    Args:
        options: Options of the server; the models are generated.
        seconds: Seconds of one load in one round.
        rounds: Number of rounds.
    """
    settings = {"options": options, "seconds": seconds, "rounds": rounds, "shares": SHARES, "factors": FACTORS}
    with report.recording("media", settings) as record, ExitStack() as stack:
        requests = _requests()
        server = stack.enter_context(serving(_command(options, stack), start_timeout_s=300.0))
        server.card()
        capacity = _capacity(server, requests, seconds)
        record.results["capacity_per_s"] = capacity
        offers = {
            kind: stack.enter_context(worker(partial(OpenLoop, server.port, given))) for kind, given in requests.items()
        }
        probe = stack.enter_context(worker(partial(HealthProbe, server.port)))
        loads = {"texts alone": {"text": IDLE_RATE}} | {
            f"{factor:g} x {number(capacity)}/s": {k: factor * capacity * SHARES[k] / 100 for k in KINDS}
            for factor in FACTORS
        }
        outcomes = {load: {kind: ArrivalsOutcome() for kind in rates} for load, rates in loads.items()}
        health = {load: ProbeOutcome() for load in loads}
        with report.progress("media", rounds * len(loads)) as bar:
            for round_number in range(rounds):
                for load, rates in loads.items():
                    found, checks = _offer(offers, probe, rates, seconds, SEED + round_number)
                    for kind, outcome in found.items():
                        outcomes[load][kind].add(outcome)
                    health[load].add(checks)
                    bar.advance(bar.task_ids[0])
        _report(record, outcomes, health)


def _command(options: Options, stack: ExitStack) -> list[str]:
    """Return the command of a server with a tiny model for each kind."""
    from tests.models.tiny import build

    folder = Path(stack.enter_context(TemporaryDirectory(prefix="perf-media-")))
    command = replace(options, model=None).serve_command()
    for kind, model in KINDS.items():
        command += ["--model", f"{kind}={build(model, folder / kind)}"]
    return [*command, "--offline", "--max-connections", str(MAX_CONNECTIONS)]


def _requests() -> dict[str, tuple[bytes, ...]]:
    """Return complete requests of each kind."""
    lottery = random.Random(SEED)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "no", "dog", "near", "old", "house"]
    texts = [" ".join(lottery.choices(words, k=lottery.randint(*TEXT_WORDS))) for _ in range(200)]
    images = [_url("image/jpeg", jpeg("vga", seed)) for seed in range(32)]
    videos = [_url("video/mp4", mp4(VIDEO_S[seed % len(VIDEO_S)], seed)) for seed in range(12)]
    bodies: dict[str, list[dict[str, object]]] = {
        "text": [{"input": text} for text in texts],
        "image": [_message({"type": "image_url", "image_url": {"url": url}}) for url in images],
        "video": [
            _message({"type": "video_url", "video_url": {"url": url}})
            | {"media_io_kwargs": {"video": {"num_frames": 8}}}
            for url in videos
        ],
    }
    return {
        kind: tuple(
            post("/v1/embeddings", json.dumps({"model": kind, "encoding_format": "base64", **body}).encode())
            for body in given
        )
        for kind, given in bodies.items()
    }


def _url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _message(part: Mapping[str, object]) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": [part]}]}


def _capacity(server: Server, requests: Mapping[str, Sequence[bytes]], seconds: float) -> float:
    """Return the requests a second of a closed loop of all kinds in their shares."""
    lottery = random.Random(SEED)
    mixed = [given[place % len(given)] for kind, given in requests.items() for place in range(SHARES[kind])]
    lottery.shuffle(mixed)
    with worker(partial(LoadGenerator, server.port, tuple(mixed))) as generate:
        generate(Load(clients=CLIENTS, max_requests=len(mixed)))
        return generate(Load(clients=CLIENTS, seconds=seconds, patience_s=TIMEOUT_S)).rate


def _offer(
    offers: Mapping[str, Worker[Arrivals, ArrivalsOutcome]],
    probe: Worker[float, ProbeOutcome],
    rates: Mapping[str, float],
    seconds: float,
    seed: int,
) -> tuple[dict[str, ArrivalsOutcome], ProbeOutcome]:
    """Offer each kind from a process of its own, and probe `/health` beside them."""
    for place, (kind, rate) in enumerate(rates.items()):
        arrivals = Arrivals(
            rate=rate, seconds=seconds, seed=10 * seed + place, timeout_s=TIMEOUT_S, max_connections=MAX_CONNECTIONS
        )
        offers[kind].begin(arrivals)
    checks = probe(seconds)
    return {kind: offers[kind].end() for kind in rates}, checks


def _report(
    record: report.Record, outcomes: Mapping[str, Mapping[str, ArrivalsOutcome]], health: Mapping[str, ProbeOutcome]
) -> None:
    rows = [_row(load, kind, outcome) for load, found in outcomes.items() for kind, outcome in found.items()]
    report.show_table("Texts, images and videos at once", COLUMNS, rows, "default settings; times from when due")
    checks = {load: Summary.of(each.latencies_ms) for load, each in health.items()}
    health_rows = [[load, *Summary.cells(each), str(health[load].timeouts)] for load, each in checks.items()]
    report.show_table("/health meanwhile", ("load", "p50 ms", "p99", "max", "n", "time-outs"), health_rows)
    record.results |= {"outcomes": outcomes, "health_ms": checks}
    (alone, *loads) = outcomes
    idle = Summary.of(outcomes[alone]["text"].accepted_ms)
    for load in loads:
        errors = sum(map(errors_of, outcomes[load].values()))
        texts = Summary.of(outcomes[load]["text"].accepted_ms)
        record.show_target(f"errors but 429, {load}", errors, 0, "")
        if idle is None or texts is None:
            raise RuntimeError("no text was answered")
        record.show_target(f"p99 of texts, {load}, times alone", texts.p99 / idle.p99, SLOWER, "times")
        beside = checks[load]
        if beside is not None:
            record.show_target(f"p99 of /health, {load}", beside.p99, HEALTH_MS, "ms")


def errors_of(outcome: ArrivalsOutcome) -> int:
    """Return the number of requests that ended otherwise than with 200 or 429."""
    return sum(outcome.other_statuses.values()) + outcome.broken + outcome.not_sent + outcome.timeouts


def _row(load: str, kind: str, outcome: ArrivalsOutcome) -> list[str]:
    others = {**outcome.other_statuses} | {
        name: count for name, count in (("broken", outcome.broken), ("not sent", outcome.not_sent)) if count
    }
    return [
        load, kind, str(outcome.offered), str(len(outcome.accepted_ms)), str(len(outcome.rejected_ms)),
        str(outcome.timeouts), ", ".join(f"{count} x {name}" for name, count in others.items()) or "0",
        *Summary.cells(Summary.of(outcome.accepted_ms))[:3],
    ]  # fmt: skip
