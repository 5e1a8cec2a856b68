"""Cost of a `Pool`: beside its own engine, in memory, and beside sentence-transformers on the same weights."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import psutil
from numpy.typing import NDArray

from perf.tools import report
from perf.tools.servers import Options
from perf.tools.texts import TextSource
from perf.tools.workers import Worker, worker
from staged_pool.runtime.config import DType

Way: TypeAlias = Literal["engine", "embed", "encode"]
"""`Engine.embed` inside the event loop, `Pool.embed`, or `encode`."""

TOKENS: Final = 12
SAMPLES: Final = 10
"""Samples of the memory of a stream."""

TARGET_RATIO: Final = 1.05
TARGET_GROWTH_MB: Final = 40.0
"""Maximum growth of the resident memory that counts as flat: a quarter of the vectors of 100,000 texts.

oneDNN keeps a kernel for each size of batch, so the first sizes take memory.
"""
TARGET_DIFFERENCE: Final = 1e-5
TARGET_COSINE: Final = 0.999

_POOLS: Final[dict[str, DType]] = {"Pool, float32": "float32", "Pool, auto": "auto"}
_THEIRS: Final = "sentence-transformers"


@dataclass(frozen=True, slots=True)
class Ask:
    """A call of a contender."""

    texts: Sequence[str]
    way: Way = "encode"
    with_vectors: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds of a call, and its vectors if they were asked for."""

    seconds: float
    vectors: NDArray[np.float32] | None = None


class PoolContender:
    """A pool on the model."""

    def __init__(self, options: Options, dtype: DType) -> None:
        from staged_pool import Pool

        self.pool = Pool(
            options.model,
            backend="trio" if options.backend == "trio" else "asyncio",
            device=options.device,
            dtype=dtype,
            torch_threads=options.torch_threads,
        ).open()

    def __call__(self, ask: Ask) -> Answer:
        if ask.way == "engine":
            return Answer(self.pool.call(partial(_inside, texts=ask.texts)))
        started = time.perf_counter()
        vectors = self.pool.embed(ask.texts).embeddings if ask.way == "embed" else self.pool.encode(list(ask.texts))
        return Answer(time.perf_counter() - started, vectors if ask.with_vectors else None)


async def _inside(engine: Any, texts: Sequence[str]) -> float:
    started = time.perf_counter()
    await engine.embed(texts)
    return time.perf_counter() - started


class TheirContender:
    """sentence-transformers in its own way: float32, batches of 32."""

    def __init__(self, folder: Path) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(str(folder), device="cpu")

    def __call__(self, ask: Ask) -> Answer:
        started = time.perf_counter()
        vectors = self._model.encode(list(ask.texts), show_progress_bar=False)
        return Answer(time.perf_counter() - started, vectors if ask.with_vectors else None)


class Streaming:
    """A pool that embeds a stream of texts, and samples the memory of its process."""

    def __init__(self, options: Options, texts: Sequence[str]) -> None:
        self._pool = PoolContender(options, options.dtype).pool
        self._texts = texts

    def __call__(self, count: int) -> tuple[float, list[float]]:
        """Return the seconds of a stream, and the memory in MB after each part."""
        process, samples_mb = psutil.Process(), list[float]()
        texts = (f"{self._texts[place % len(self._texts)]} {place}" for place in range(count))
        started = time.perf_counter()
        for place, _ in self._pool.embed_stream(texts):
            if (place + 1) % (count // SAMPLES) == 0:
                samples_mb.append(process.memory_info().rss / 1e6)
        return time.perf_counter() - started, samples_mb


def run(options: Options, *, rounds: int, texts: int, streamed: int) -> None:
    """Measure, print and record.

    In each round every contender has the same texts once, in alternating order, while the others are idle. A ratio is
    that of one round.
    """
    source = TextSource(options.model)
    (given,) = source.equal_lists(requests=1, texts=texts, tokens=TOKENS)
    settings = {"options": options, "rounds": rounds, "texts": texts, "tokens": TOKENS, "streamed": streamed}
    with report.recording("pool", settings) as record:
        with ExitStack() as running:
            contenders: dict[str, Worker[Ask, Answer]] = {
                name: running.enter_context(worker(partial(PoolContender, options, dtype)))
                for name, dtype in _POOLS.items()
            }
            contenders[_THEIRS] = running.enter_context(worker(partial(TheirContender, source.folder)))
            _compare_vectors(record, contenders, given)
            _report_cost(record, _in_turns({"pool": contenders["Pool, auto"]}, ("engine", "embed"), rounds, given))
            _report_encode(record, _in_turns(contenders, ("encode",), rounds, given), texts)
        with worker(partial(Streaming, options, given)) as stream:
            _report_stream(record, *stream(streamed), streamed)


def _in_turns(
    contenders: dict[str, Worker[Ask, Answer]], ways: Sequence[Way], rounds: int, texts: Sequence[str]
) -> dict[str, list[float]]:
    """Return the seconds of each contender and way, in each round."""
    turns = [(f"{name}, {way}" if len(ways) > 1 else name, name, way) for name in contenders for way in ways]
    found: dict[str, list[float]] = {title: [] for title, _, _ in turns}
    with report.progress("rounds", rounds) as bar:
        for place in range(rounds):
            for title, name, way in turns[:: -1 if place % 2 else 1]:
                found[title].append(contenders[name](Ask(texts, way)).seconds)
            bar.advance(bar.task_ids[0])
    return found


def _ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def _compare_vectors(record: report.Record, contenders: dict[str, Worker[Ask, Answer]], texts: Sequence[str]) -> None:
    """Hold the vectors of the pools against the others, as a warm-up."""
    vectors = {name: contender(Ask(texts, with_vectors=True)).vectors for name, contender in contenders.items()}
    theirs = vectors[_THEIRS]
    for name, dtype in _POOLS.items():
        ours = vectors[name]
        if ours is None or theirs is None:
            raise TypeError("a contender has given no vectors")
        difference = float(np.abs(ours - theirs).max())
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        cosine = float((np.einsum("ij,ij->i", ours, theirs) / lengths).min())
        record.results[f"vectors of {name}"] = {"max_difference": difference, "min_cosine": cosine}
        if dtype == "float32":
            record.show_target(f"{name}: largest difference", difference, TARGET_DIFFERENCE, "")
        record.show_target(f"{name}: least cosine", cosine, TARGET_COSINE, "", at_least=True)


def _report_cost(record: report.Record, seconds: dict[str, list[float]]) -> None:
    inside, outside = seconds.values()
    record.results["cost"] = seconds
    record.show_target("Pool.embed, times Engine.embed", _ratio(outside, inside), TARGET_RATIO, "")


def _report_encode(record: report.Record, seconds: dict[str, list[float]], texts: int) -> None:
    record.results["encode"] = seconds
    rows = [
        (name, report.number(texts / statistics.median(found)), report.number(_ratio(seconds[_THEIRS], found)))
        for name, found in seconds.items()
    ]
    report.show_table("encode", ("", "texts/s", "times as fast"), rows, note="Medians; ratios of rounds.")


def _report_stream(record: report.Record, seconds: float, samples_mb: Sequence[float], streamed: int) -> None:
    growth_mb = max(samples_mb[1:]) - samples_mb[0]
    record.results["stream"] = {"texts_per_s": streamed / seconds, "rss_mb": samples_mb}
    rows = [(f"{streamed * place // SAMPLES:,}", f"{rss_mb:.0f}") for place, rss_mb in enumerate(samples_mb, start=1)]
    report.show_table("stream", ("texts", "RSS, MB"), rows, note=f"{streamed / seconds:.0f} texts/s")
    record.show_target("growth after the first tenth of the stream", growth_mb, TARGET_GROWTH_MB, "MB")
