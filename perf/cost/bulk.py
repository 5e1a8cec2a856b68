"""Rate of a job of texts beside the bare model, and its memory by lines."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import psutil

from perf.contenders.bare import BareLoad, BareLoop
from perf.cost.mock import MockModel, engines_of
from perf.tools import report
from perf.tools.servers import Options
from perf.tools.texts import TextSource
from perf.tools.workers import worker
from staged_pool.api.bulk.job import Progress, Summary
from staged_pool.api.bulk.opening import TEXT_WINDOW, TextFormats, job_files, open_texts
from staged_pool.api.bulk.text_work import TextWork
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import governor_for, open_engine
from staged_pool.runtime.settings import DAY_S

TOKENS: Final = 32
"""Tokens of each text of the comparison."""

BARE_TEXTS: Final = 64
"""Texts of a forward of the bare loop."""

SHORT_LINES: Final = 10_000
"""Lines of the file to whose memory that of the long file is compared."""

TARGET_RATIO: Final = 0.95
TARGET_GROWTH: Final = 1.10


@dataclass(frozen=True, slots=True)
class Done:
    """Outcome of a job."""

    lines_per_s: float
    rss_mb: float
    """Largest resident memory while it ran, in 10^6 bytes."""


class Job:
    """Process that runs jobs on a model: lines of a file in, rows of numpy out.

    Args:
        options: Options of the model. None: a mock model, which computes nothing.
    """

    def __init__(self, options: Options | None) -> None:
        self._options = options
        self._backend = "asyncio" if options is None else options.backend

    def __call__(self, source: Path) -> Done:
        return anyio.run(self._run, source, backend="trio" if self._backend == "trio" else "asyncio")

    async def _run(self, source: Path) -> Done:
        process, most = psutil.Process(), 0

        def watch(_: Progress) -> None:
            nonlocal most
            most = max(most, process.memory_info().rss)

        async with self._opened() as engine:
            summary = await embed_file(engine, source, watch)
        return Done((summary.completed + summary.failed) / summary.seconds, most / 1e6)

    def _opened(self) -> AbstractAsyncContextManager[Engine]:
        if self._options is None:
            return _mock_engine()
        # As of the command, and without coalescing: the bare loop computes equal texts each time.
        config = replace(self._options.engine_config(), target_delay_s=float(DAY_S), coalesce=False)
        return open_engine(config)


async def embed_file(engine: Engine, source: Path, watch: Callable[[Progress], None]) -> Summary:
    """Embed the lines of a file, as the command does."""
    opening = partial(
        open_texts,
        source=source,
        output=source.with_suffix(".npy"),
        errors=None,
        formats=TextFormats("text", "npy"),
        identity={},
        existing="overwrite",
    )
    async with job_files(opening) as job:
        work = TextWork(partial(engine.embed, priority="bulk"))
        return await job.run(work, window=TEXT_WINDOW, report=watch)


@asynccontextmanager
async def _mock_engine() -> AsyncIterator[Engine]:
    config = EngineConfig(coalesce=False, target_delay_s=float(DAY_S))
    async with engines_of(MockModel(), [config], governor_for(config)) as engines:
        (engine,) = engines.values()
        yield engine


def run(options: Options, *, rounds: int, texts: int, lines: int) -> None:
    """Measure, print and record.

    In each round the bare loop and a job have the same texts, one after the other. The memory is that of a mock model,
    which computes nothing, so that a long file takes a minute.
    """
    settings = {"options": options, "rounds": rounds, "texts": texts, "tokens": TOKENS, "lines": lines}
    with report.recording("bulk", settings) as record, tempfile.TemporaryDirectory() as folder:
        _compare_rates(record, options, Path(folder), rounds=rounds, texts=texts)
        _compare_memory(record, Path(folder), lines)


def _compare_rates(record: report.Record, options: Options, folder: Path, *, rounds: int, texts: int) -> None:
    groups = TextSource(options.model).equal_lists(requests=-(-texts // BARE_TEXTS), texts=BARE_TEXTS, tokens=TOKENS)
    source = _written(folder / "texts.txt", [text for group in groups for text in group])
    bare_rates: list[float] = []
    job_rates: list[float] = []
    with worker(partial(BareLoop, options)) as bare, report.progress("rounds", rounds) as bar:
        for _ in range(rounds):
            with worker(partial(Job, options)) as job:
                job_rates.append(job(source).lines_per_s)
            rate = bare(BareLoad(groups, seconds=2 * texts / job_rates[-1]))
            bare_rates.append(rate.groups * BARE_TEXTS / rate.elapsed_s)
            bar.advance(bar.task_ids[0])
    record.results["lines_per_s"] = {"bare": bare_rates, "job": job_rates}
    rows = [
        (name, report.number(statistics.median(rates)))
        for name, rates in (("bare loop", bare_rates), ("job", job_rates))
    ]
    report.show_table("rate", ("", "lines/s"), rows, note=f"Medians of {rounds} rounds; texts of {TOKENS} tokens.")
    ratio = statistics.median(job / bare for job, bare in zip(job_rates, bare_rates, strict=True))
    record.show_target("job, times the bare loop", ratio, TARGET_RATIO, "", at_least=True)


def _compare_memory(record: report.Record, folder: Path, lines: int) -> None:
    found: dict[int, Done] = {}
    for count in (SHORT_LINES, lines):
        source = _written(folder / f"{count}.txt", (f"a text of a few words, number {place}" for place in range(count)))
        with worker(partial(Job, None)) as job:
            found[count] = job(source)
        source.with_suffix(".npy").unlink()
    record.results["memory"] = {str(count): done for count, done in found.items()}
    rows = [(f"{count:,}", f"{done.rss_mb:.0f}", report.number(done.lines_per_s)) for count, done in found.items()]
    report.show_table("memory", ("lines", "RSS, MB", "lines/s"), rows, note="A mock model.")
    growth = found[lines].rss_mb / found[SHORT_LINES].rss_mb
    record.show_target("memory, times that of the short file", growth, TARGET_GROWTH, "")


def _written(path: Path, texts: Iterable[str]) -> Path:
    """Write texts, one a line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{text}\n" for text in texts)
    return path
