"""Latency of `/health` under a flood of images, compared with a naive FastAPI handler."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from perf.tools import report
from perf.tools.jpegs import clip_folder, embedding_request, jpeg, score_request
from perf.tools.load import HealthProbe, Load, LoadGenerator, ProbeOutcome
from perf.tools.report import number
from perf.tools.servers import Card, Options, Server, serving
from perf.tools.workers import worker
from perf.under_load.flood import Flood

IMAGES: Final = 16
LARGE_BODY_BYTES: Final = 20_000_000
BURNT_S: Final = 0.05
"""CPU seconds that the folder's own image processor burns for each image, under the GIL."""
IDLE_SECONDS: Final = 4.0
WARM_UP_REQUESTS: Final = 2

MEDIAN_MS: Final = 1.0
OVER_IDLE_MS: Final = 0.3
P99_MS: Final = 10.0

COLUMNS: Final = (
    "load", "images/s", "rejected", "unanswered", "idle health p50", "health p50", "p99", "max", "n", "time-outs",
)  # fmt: skip
NOTE: Final = "ms; of fewer than 100 samples, p99 is the largest"

_OWN_PROCESSOR: Final = """
import time
from transformers import CLIPImageProcessorPil

class BurningImageProcessor(CLIPImageProcessorPil):
    def preprocess(self, images, *args, **kwargs):
        end = time.thread_time() + %s
        while time.thread_time() < end:
            sum(range(1000))
        return super().preprocess(images, *args, **kwargs)
"""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of load."""

    name: str
    requests: tuple[bytes, ...]
    images_per_request: int
    clients: int
    own_code: bool = False
    """The folder has an image processor of its own."""


def run(options: Options, *, rounds: int, seconds: float, clients: int) -> None:
    """Measure, print and record.

    The model is generated, because one of the loads needs a copy with a processor of its own. Rounds alternate between
    the two servers, each a new one, so that neither shares the cores with the other.
    """
    settings = {"options": options, "rounds": rounds, "seconds": seconds, "clients": clients}
    scenarios = _scenarios(clients)
    with report.recording("liveness-images", settings) as record, clip_folder() as folder, burning(folder) as own:
        rows: list[list[str]] = []
        with report.progress("liveness", 2 * rounds * len(scenarios)) as bar:
            for scenario in scenarios:
                staged, naive, idle = (Flood(scenario.images_per_request) for _ in range(3))
                served = replace(options, model=str(own if scenario.own_code else folder))
                for _ in range(rounds):
                    own_code = ["--trust-remote-code"] if scenario.own_code else []
                    with serving([*served.serve_command(), *own_code]) as server:
                        card = server.card()
                        _round(server, scenario, staged, seconds, idle=idle.health)
                    bar.advance(bar.task_ids[0])
                    with serving([*_naive_command(served, card), *own_code]) as server:
                        server.wait_ok("/health")
                        # It closes connections before it has read from them.
                        _round(server, scenario, naive, seconds, strict=False)
                    bar.advance(bar.task_ids[0])
                rows += _report(record, scenario, staged, naive, idle.health)
        report.show_table("While images are sent", COLUMNS, rows, NOTE)
        for target in record.targets:
            target.show()


def _scenarios(clients: int) -> list[Scenario]:
    images = [jpeg("1080p", seed) for seed in range(IMAGES)]
    single = tuple(embedding_request([image]) for image in images)
    many = LARGE_BODY_BYTES // len(single[0])
    large = embedding_request(images[place % IMAGES] for place in range(many))
    # One image each: 300 requests of two would exceed the default limit on the bytes of bodies.
    scores = tuple(score_request("a small red image", [image]) for image in images)
    return [
        Scenario(f"{clients} clients, 1 image of 1080p each", single, 1, clients),
        Scenario(f"{clients} clients, /score of a text and 1 image of 1080p each", scores, 1, clients),
        Scenario(f"8 clients, bodies of {len(large) / 1e6:.0f} MB", (large,), many, 8),
        Scenario("32 clients, a processor that burns CPU", single, 1, 32, own_code=True),
    ]


@contextmanager
def burning(folder: Path, burnt_s: float = BURNT_S) -> Iterator[Path]:
    """Copy the model, with an image processor of its own that holds the GIL.

    Args:
        folder: Folder of the model.
        burnt_s: Seconds of CPU time that it computes for each image.
    """
    with TemporaryDirectory(prefix="perf-clip-own-") as name:
        copy = Path(shutil.copytree(folder, name, dirs_exist_ok=True))
        (copy / "image_processing_burning.py").write_text(_OWN_PROCESSOR % burnt_s)
        file = copy / "preprocessor_config.json"
        settings = json.loads(file.read_text())
        settings["image_processor_type"] = "BurningImageProcessor"
        settings["auto_map"] = {"AutoImageProcessor": "image_processing_burning.BurningImageProcessor"}
        file.write_text(json.dumps(settings))
        yield copy


def _naive_command(options: Options, card: Card) -> list[str]:
    same = {"--folder": options.model, "--dtype": card.dtype, "--torch-threads": card.torch_threads}
    return [
        sys.executable,
        "-m",
        "perf.contenders.naive_images",
        *(str(part) for pair in same.items() for part in pair),
    ]


def _round(
    server: Server,
    scenario: Scenario,
    flood: Flood,
    seconds: float,
    *,
    idle: ProbeOutcome | None = None,
    strict: bool = True,
) -> None:
    with (
        worker(partial(LoadGenerator, server.port, scenario.requests)) as generate,
        worker(partial(HealthProbe, server.port)) as probe,
    ):
        generate(Load(clients=1, max_requests=WARM_UP_REQUESTS))
        if idle is not None:
            idle.add(probe(IDLE_SECONDS))
        flood.run(generate, probe, Load(clients=scenario.clients, seconds=seconds, strict=strict))


def _report(
    record: report.Record, scenario: Scenario, staged: Flood, naive: Flood, idle: ProbeOutcome
) -> Iterator[list[str]]:
    idle_p50 = report.Summary.of(idle.latencies_ms)
    floods = {"staged-pool": staged, "FastAPI, inline": naive}
    record.results[scenario.name] = {name: flood.result() for name, flood in floods.items()} | {
        "idle_health_ms": idle_p50
    }
    for name, flood in floods.items():
        rate, _, _, _, _, rejected, unanswered, *health = flood.row()
        shown = number(idle_p50.p50) if idle_p50 is not None and flood is staged else "-"
        yield [f"{name}: {scenario.name}", rate, rejected, unanswered, shown, *health]
    health_ms = report.Summary.of(staged.health.latencies_ms)
    if health_ms is None or idle_p50 is None:
        raise RuntimeError("no health check was answered")
    median_ms = max(MEDIAN_MS, idle_p50.p50 + OVER_IDLE_MS)
    record.keep_target(f"/health median: {scenario.name}", health_ms.p50, median_ms, "ms")
    record.keep_target(f"/health p99: {scenario.name}", health_ms.p99, P99_MS, "ms")
    record.keep_target(f"/health time-outs: {scenario.name}", staged.health.timeouts, 0, "checks")
