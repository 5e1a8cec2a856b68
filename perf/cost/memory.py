"""Growth of the server's memory over ten thousand requests, and its composition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import psutil

from perf.tools import report
from perf.tools.load import Load, LoadGenerator
from perf.tools.servers import Options, serving
from perf.tools.texts import TextSource
from perf.tools.workers import worker

CLIENTS: Final = 8
FIRST_REQUESTS: Final = 1000
SAMPLE_EVERY: Final = 250
TARGET_MB: Final = 800.0
TARGET_KB_PER_1000: Final = 100.0
"""Maximum growth that counts as flat: over ten thousand requests about 0.1 % of `TARGET_MB`."""


HELD: Final = ("anonymous", "libraries", "weights", "other files")
"""Kinds of memory: allocated, mapped code, mapped weights, and other mapped files."""


@dataclass(frozen=True, slots=True)
class Sample:
    """State of the idle server after a number of requests."""

    requests: int
    rss_mb: float
    held_mb: Mapping[str, float]
    """Resident memory by `HELD`."""
    threads: int
    fds: int

    @classmethod
    def of(cls, process: psutil.Process, requests: int) -> Sample:
        with process.oneshot():
            return cls(
                requests,
                process.memory_info().rss / 1e6,
                held_mb(process),
                process.num_threads(),
                process.num_fds(),
            )


def held_mb(process: psutil.Process) -> dict[str, float]:
    """Return the resident memory of a process by `HELD`, in MB."""
    found = Counter[str]()
    for mapping in process.memory_maps(grouped=True):
        found[_held(mapping.path)] += mapping.rss
    return {kind: found[kind] / 1e6 for kind in HELD}


def _held(path: str) -> str:
    if not path.startswith("/"):
        return "anonymous"
    if path.endswith(".safetensors"):
        return "weights"
    return "libraries" if ".so" in path else "other files"


def run(options: Options, *, requests: int) -> None:
    """Measure, print and record.

    The server is sampled between loads of a few hundred requests, while it is idle; the connections stay open.
    """
    workload = TextSource(options.model).workload("day")
    settings = {"options": options, "clients": CLIENTS, "first_requests": FIRST_REQUESTS, "requests": requests}
    with report.recording("memory", settings) as record, serving(options.serve_command()) as server:
        record.results["model"] = server.card()
        process = psutil.Process(server.process.pid)
        ready = Sample.of(process, 0)
        with (
            worker(partial(LoadGenerator, server.port, workload.requests)) as generate,
            report.progress("memory", FIRST_REQUESTS + requests) as bar,
        ):
            generate(Load(clients=CLIENTS, max_requests=FIRST_REQUESTS))
            bar.advance(bar.task_ids[0], FIRST_REQUESTS)
            samples = [Sample.of(process, FIRST_REQUESTS)]
            while (done := samples[-1].requests - FIRST_REQUESTS) < requests:
                sent = min(SAMPLE_EVERY, requests - done)
                generate(Load(clients=CLIENTS, max_requests=sent))
                bar.advance(bar.task_ids[0], sent)
                samples.append(Sample.of(process, samples[-1].requests + sent))
        _report(record, ready, samples)


def _report(record: report.Record, ready: Sample, samples: list[Sample]) -> None:
    shown = [ready, *samples[:: max(1, len(samples) // 5)]]
    if shown[-1] is not samples[-1]:
        shown.append(samples[-1])
    report.show_table(
        "The server's memory",
        ["requests", "RSS MB", *HELD, "threads", "fds"],
        [
            [
                str(s.requests),
                f"{s.rss_mb:.1f}",
                *(f"{s.held_mb[kind]:.0f}" for kind in HELD),
                str(s.threads),
                str(s.fds),
            ]
            for s in shown
        ],
    )
    xs, ys = [s.requests / 1000 for s in samples], [s.rss_mb * 1000 for s in samples]
    slope_kb = float(np.polyfit(xs, ys, 1)[0])
    rss_mb = max(s.rss_mb for s in samples)
    record.results |= {"ready": ready, "samples": samples, "slope_kb_per_1000_requests": slope_kb, "max_rss_mb": rss_mb}
    record.show_target("largest RSS", rss_mb, TARGET_MB, "MB")
    record.show_target("growth, a least-squares fit", slope_kb, TARGET_KB_PER_1000, "KB per 1,000 requests")
    record.show_target("threads gained", samples[-1].threads - samples[0].threads, 0, "threads")
    record.show_target("file descriptors gained", samples[-1].fds - samples[0].fds, 0, "fds")
