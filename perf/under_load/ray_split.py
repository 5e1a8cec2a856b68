"""Both forms on Ray Serve: rates of texts and of images, and what a kill costs in the split form."""

from __future__ import annotations

import json
import tempfile
import time
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from perf.tools import report
from perf.tools.checked_load import CheckedLoad, Counts
from perf.tools.client import post
from perf.tools.jpegs import jpeg
from perf.tools.known_vectors import known_vectors, tiny_model
from perf.tools.load import Load, closed_loop_rate
from perf.tools.ray_cluster import HAPROXY, ServeCluster, serve_cluster
from staged_pool.ray import app
from staged_pool.ray.split import ENGINE, PREPARER
from staged_pool.runtime.config import EngineConfig

CLIENTS: Final = 8
SIDE: Final = 448
"""Pixels of each side of a prepared image: 602 KB, which go through the object store."""
PATIENCE_S: Final = 30.0
SHARE: Final[Mapping[str, Any]] = {"ray_actor_options": {"num_cpus": 0.5}}


def run(rounds: int, seconds: float) -> None:
    """Measure, print the tables, and write `ray-split.json` or `ray-split-haproxy.json`."""
    name = "ray-split-haproxy" if HAPROXY else "ray-split"
    rates: dict[str, dict[str, list[float]]] = {}
    with report.recording(name, {"rounds": rounds, "seconds": seconds, "haproxy": HAPROXY}) as record:
        with tempfile.TemporaryDirectory() as folder:
            texts, images = (
                tiny_model(Path(folder) / "texts", served_name="texts"),
                large_image_model(Path(folder) / "images"),
            )
            forms: Mapping[str, Mapping[str, Any]] = {
                "2 replicas": {"num_replicas": 2, **SHARE},
                "split: 2 preparers, 2 engines": {
                    "preparers": {"num_replicas": 2, **SHARE},
                    "num_replicas": 2,
                    **SHARE,
                },
            }
            vectors = known_vectors(texts)
            for place in range(rounds):
                for form, options in forms.items():
                    with serve_cluster([0, 2]) as cluster:
                        cluster.deploy(app([texts, images], **options))
                        for what, requests in (("texts", _texts()), ("images", _images())):
                            load = Load(clients=CLIENTS, seconds=seconds, patience_s=PATIENCE_S)
                            rate = closed_loop_rate(cluster.port, requests, load)
                            rates.setdefault(what, {}).setdefault(form, []).append(rate)
                            report.console.print(f"{form}: {report.number(rate)} {what}/s")
                        if place == 0 and "preparers" in options:
                            for killed in (ENGINE, PREPARER):
                                counts = _kill(cluster, vectors, killed)
                                record.results[f"{killed} killed"] = {
                                    "asked": counts.asked,
                                    "rejected": counts.rejected,
                                    "failed": dict(counts.failed),
                                }
                                record.keep_target(f"{killed} killed: wrong vectors", counts.wrong, 0, "")
        record.results["rates"] = rates
    rows = [(what, *(" ".join(map(report.number, found)) for found in by.values())) for what, by in rates.items()]
    report.show_table(f"Answers a second, {CLIENTS} clients", ("", *next(iter(rates.values()))), rows)


def _kill(cluster: ServeCluster, vectors: Any, name: str) -> Counts:
    """Kill a replica under load, and wait until its deployment is whole again."""
    with CheckedLoad(cluster.port, vectors, clients=CLIENTS, model="texts") as load:
        cluster.wait(lambda: load.counts.answers > 100)
        killed = cluster.kill_replica(name)
        seconds = cluster.wait(
            lambda: killed not in (pids := cluster.pids(name)) and len(pids) == cluster.running(name) == 2
        )
        time.sleep(3)
    counts = load.counts
    failed = ", ".join(f"{count} x {what}" for what, count in counts.failed.items()) or "0"
    report.console.print(
        f"{name} killed: {failed} failed and {counts.rejected} rejected of {counts.asked}, "
        f"{counts.wrong} wrong; replaced after {seconds:.0f} s"
    )
    return counts


def large_image_model(folder: Path) -> EngineConfig:
    """Build a tiny model of large images in a folder, and return its settings. It caches no images."""
    from tests.models.tiny.images import dinov3
    from tests.models.tiny.layout import edit_json

    folder.mkdir()
    dinov3(folder)
    edit_json(folder / "preprocessor_config.json", size={"height": SIDE, "width": SIDE})
    return EngineConfig(model=str(folder), dtype="float32", torch_threads=1, served_name="images", image_cache_mb=0)


def _texts() -> tuple[bytes, ...]:
    bodies = [{"model": "texts", "input": f"a short text, number {number}"} for number in range(200)]
    return tuple(post("/v1/embeddings", json.dumps(body).encode()) for body in bodies)


def _images() -> tuple[bytes, ...]:
    urls = [f"data:image/jpeg;base64,{b64encode(jpeg('vga', seed)).decode()}" for seed in range(32)]
    bodies = [{"model": "images", "input": [url], "modality": "image"} for url in urls]
    return tuple(post("/v1/embeddings", json.dumps(body).encode()) for body in bodies)
