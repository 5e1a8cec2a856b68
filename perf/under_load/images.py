"""Throughput of images, compared with a bare pipeline, and latency of texts beside images."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from perf.contenders.bare import BareLoad, BareLoop, given
from perf.tools import report
from perf.tools.client import Connection, post, stage_times_ms, successful
from perf.tools.jpegs import SIZES, Size, clip_folder, embedding_request, jpeg
from perf.tools.load import Load, LoadGenerator, LoadOutcome
from perf.tools.report import number
from perf.tools.servers import START_TIMEOUT_S, Options, Server, serving
from perf.tools.texts import TextSource, embeddings_body
from perf.tools.workers import Worker, worker

LIMITS: Final = (1, 2, 4)
IMAGES: Final = 64
"""Number of different images, all of them in the large request; equal ones would be coalesced."""
LARGE_REPEATS: Final = 3
"""Repeats of the large request in a round."""
BATCH: Final = 8
"""Batch size of the bare pipeline."""
CLIENTS: Final = 16
TEXT_EVERY_S: Final = 0.05
TEXT_TOKENS: Final = 12
PATIENCE_S: Final = 60.0

KEPT: Final = 0.90
SLOWER: Final = 2.0
WAIT_MS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Bare:
    """Performance of the machine without a server."""

    images_per_s: float
    """Rate on all cores, a few images in a batch."""
    prepare_s: float
    """Seconds to preprocess one image on one idle core."""
    forward_s: float
    """Seconds of a forward for one image of a batch, on one core."""


class BarePipeline:
    """Measurement of the bare pipeline."""

    def __init__(self, options: Options, images: Sequence[bytes]) -> None:
        self._loop = BareLoop(options)
        self._images = images
        self._cores = len(os.sched_getaffinity(0))

    def __call__(self, seconds: float) -> Bare:
        batches = [list(map(given, self._images[start : start + BATCH])) for start in range(0, IMAGES, BATCH)]
        prepare_s, forward_s = zip(*(self._loop.batch(batch, self._cores) for batch in batches), strict=True)
        rate = self._loop(BareLoad([[image] for image in self._images], seconds, BATCH))
        return Bare(
            rate.groups / rate.elapsed_s, statistics.median(prepare_s) / BATCH, statistics.median(forward_s) / BATCH
        )


@dataclass(slots=True)
class TextTimes:
    """Times of one client that sends short texts."""

    latencies_ms: list[float] = field(default_factory=list)
    queue_ms: list[float] = field(default_factory=list)
    """Wait for the device, as `Server-Timing` reports it."""


class PacedTexts:
    """Client that sends a short text over HTTP every `TEXT_EVERY_S`, one at a time."""

    def __init__(self, port: int, requests: Sequence[bytes]) -> None:
        self._port = port
        self._requests = requests

    def __call__(self, seconds: float) -> TextTimes:
        times = TextTimes()
        connection = Connection(self._port, timeout_s=START_TIMEOUT_S)
        end = time.perf_counter() + seconds
        place = 0
        while (sent_at := time.perf_counter()) < end:
            reply = successful(connection.exchange(self._requests[place % len(self._requests)]))
            latency_s = time.perf_counter() - sent_at
            times.latencies_ms.append(latency_s * 1e3)
            times.queue_ms.append(stage_times_ms(reply)["queue"])
            place += 1
            time.sleep(max(0.0, TEXT_EVERY_S - latency_s))
        connection.close()
        return times


def run(options: Options, *, size: Size, rounds: int, seconds: float) -> None:
    """Measure, print and record.

    The bare pipeline and the servers, one for each limit of preprocess, alternate on the same images; the others are
    idle meanwhile.
    """
    images = [jpeg(size, seed) for seed in range(IMAGES)]
    width, height = SIZES[size]
    settings = {"options": options, "size": size, "rounds": rounds, "seconds": seconds, "clients": CLIENTS,
                "image_bytes": round(statistics.fmean(map(len, images)))}  # fmt: skip
    with report.recording("images", settings) as record, ExitStack() as running:
        if options.model is None:
            options = replace(options, model=str(running.enter_context(clip_folder())))
        by_default = options.engine_config().image_preprocess_threads
        servers = {limit: _server(running, options, limit) for limit in sorted({*LIMITS, by_default})}
        record.results["model"] = servers[by_default].card()
        bare = running.enter_context(worker(partial(BarePipeline, options, images)))
        report.console.print(
            f"JPEG of {width} x {height}, {settings['image_bytes']} bytes; {CLIENTS} clients of one each"
        )
        _throughput(record, running, servers, bare, images, rounds=rounds, seconds=seconds)
        _texts_beside(record, running, servers[by_default], options, images, rounds=rounds, seconds=seconds)


def _server(running: ExitStack, options: Options, limit: int) -> Server:
    command = [*options.serve_command(), "--image-preprocess-limit", str(limit), "--body-limit-mb", "64"]
    server = running.enter_context(serving(command))
    server.card()  # one after the other: loading is work too
    return server


def _throughput(
    record: report.Record,
    running: ExitStack,
    servers: dict[int, Server],
    bare: Worker[float, Bare],
    images: Sequence[bytes],
    *,
    rounds: int,
    seconds: float,
) -> None:
    requests = tuple(embedding_request([image]) for image in images)
    large = (embedding_request(images),)
    clients = {
        limit: running.enter_context(worker(partial(LoadGenerator, server.port, requests)))
        for limit, server in servers.items()
    }
    one = {
        limit: running.enter_context(worker(partial(LoadGenerator, server.port, large)))
        for limit, server in servers.items()
    }
    seen: dict[int, list[LoadOutcome]] = {limit: [] for limit in servers}
    large_s: dict[int, list[float]] = {limit: [] for limit in servers}
    of_bare: list[Bare] = []
    with report.progress("images", rounds) as bar:
        for generate in clients.values():
            generate(Load(clients=CLIENTS, max_requests=2 * CLIENTS))
        for place in range(rounds):
            of_bare.append(bare(seconds))
            for limit in list(servers)[:: -1 if place % 2 else 1]:
                load = Load(clients=CLIENTS, seconds=seconds, patience_s=PATIENCE_S)
                seen[limit].append(clients[limit](load))
                large_s[limit] += [
                    ms / 1e3 for ms in one[limit](Load(clients=1, max_requests=LARGE_REPEATS)).latencies_ms
                ]
            bar.advance(bar.task_ids[0])
    _report_throughput(record, seen, large_s, of_bare)


def _report_throughput(
    record: report.Record, seen: dict[int, list[LoadOutcome]], large_s: dict[int, list[float]], of_bare: list[Bare]
) -> None:
    cores = len(os.sched_getaffinity(0))
    bare_rate = statistics.median(bare.images_per_s for bare in of_bare)
    prepare_s, forward_s = (
        statistics.median(getattr(bare, name) for bare in of_bare) for name in ("prepare_s", "forward_s")
    )
    # The device has the same cores: the bound is the bare pipeline's time for all images, plus the latency of one.
    bound_s = IMAGES / bare_rate + prepare_s + forward_s
    rows, of_bare_by_limit = [["bare", number(bare_rate), "1", "-", number(IMAGES / bare_rate)]], {}
    for limit, outcomes in seen.items():
        rates = [outcome.rate for outcome in outcomes]
        ratio = statistics.median(rate / bare.images_per_s for rate, bare in zip(rates, of_bare, strict=True))
        of_bare_by_limit[limit] = ratio
        summary = report.Summary.of([ms for outcome in outcomes for ms in outcome.latencies_ms])
        rows.append(
            [f"limit {limit}", number(statistics.median(rates)), f"{ratio:.2f}", report.Summary.cells(summary)[0],
             number(statistics.median(large_s[limit]))]
        )  # fmt: skip
        record.results[f"limit {limit}"] = {
            "images_per_s": rates, "of_bare": ratio, "request_ms": summary, "large_request_s": large_s[limit],
            "rejected": sum(outcome.rejected for outcome in outcomes),
        }  # fmt: skip
    columns = ["image preprocess limit", "images/s", "of bare", "request p50 ms", f"{IMAGES} in one request, s"]
    note = (
        f"bare: all {cores} cores decode, prepare and compute; one image alone on one core: prepare "
        f"{number(prepare_s * 1e3)} ms, forward {number(forward_s * 1e3)} ms"
    )
    report.show_table("Images per second, closed loop", columns, rows, note)
    record.results["bare"] = of_bare
    best = max(of_bare_by_limit, key=of_bare_by_limit.__getitem__)
    for limit, ratio in of_bare_by_limit.items():
        record.show_target(f"lost against bare, limit {limit}", 100 * (1 - ratio), 100 * (1 - KEPT), "%")
    record.show_target(f"{IMAGES} images in one request, limit {best}", statistics.median(large_s[best]), bound_s, "s")


def _texts_beside(
    record: report.Record,
    running: ExitStack,
    server: Server,
    options: Options,
    images: Sequence[bytes],
    *,
    rounds: int,
    seconds: float,
) -> None:
    source, rng = TextSource(options.model), random.Random(0)
    texts = [post("/v1/embeddings", embeddings_body([source.text(TEXT_TOKENS, rng)])) for _ in range(64)]
    send_texts = running.enter_context(worker(partial(PacedTexts, server.port, texts)))
    requests = tuple(embedding_request([image]) for image in images)
    send_images = running.enter_context(worker(partial(LoadGenerator, server.port, requests)))
    alone, beside = TextTimes(), TextTimes()
    for _ in range(rounds):
        _add(alone, send_texts(seconds))
        send_images.begin(Load(clients=CLIENTS, seconds=seconds + 1.0, patience_s=PATIENCE_S))
        time.sleep(0.5)
        _add(beside, send_texts(seconds))
        send_images.end()
    rows = []
    for name, times in (("alone", alone), (f"beside {CLIENTS} clients with images", beside)):
        latency, queue = report.Summary.of(times.latencies_ms), report.Summary.of(times.queue_ms)
        rows.append([name, *report.Summary.cells(latency), *report.Summary.cells(queue)[:2]])
        record.results[f"texts {name.split()[0]}"] = {"request_ms": latency, "queue_ms": queue}
    columns = ["one short text at a time, ms", "p50", "p99", "max", "n", "queue p50", "p99"]
    report.show_table("Texts beside images", columns, rows)
    idle, busy, queue = (report.Summary.of(v) for v in (alone.latencies_ms, beside.latencies_ms, beside.queue_ms))
    if idle is None or busy is None or queue is None:
        raise RuntimeError("no text was answered")
    record.show_target("p99 of texts beside images, times idle", busy.p99 / idle.p99, SLOWER, "times")
    record.show_target("wait of texts for the device beside images, p50", queue.p50, WAIT_MS, "ms")


def _add(times: TextTimes, more: TextTimes) -> None:
    times.latencies_ms += more.latencies_ms
    times.queue_ms += more.queue_ms
