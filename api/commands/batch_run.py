"""Run of one job of `run-batch`: its files, its work and its signals."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial

import anyio
import click

from staged_pool.api.bulk.batch_lines import BatchAnswers
from staged_pool.api.bulk.job import Progress, Summary
from staged_pool.api.bulk.opening import BATCH_WINDOW, TextFormats, job_files, open_batch, open_texts, text_window
from staged_pool.api.bulk.text_work import TextWork
from staged_pool.api.commands.batch_flags import Batch
from staged_pool.api.commands.batch_sides import Side
from staged_pool.runtime.machine.signals import interrupts
from staged_pool.stages.exception_groups import single_errors


@dataclass(slots=True)
class Outcome:
    """Outcome of a run."""

    summary: Summary | None = None
    """None if a second signal cancelled the run."""
    signal: signal.Signals | None = None
    """Signal that stopped the run; None if it ended by itself."""


async def run_batch(
    batch: Batch, side: AbstractAsyncContextManager[Side], report: Callable[[Progress], None], outcome: Outcome
) -> None:
    """Run a job until it has finished, or a signal stops it.

    The first SIGINT or SIGTERM lets the lines in work finish, and a second one drops them.

    Args:
        batch: The job.
        side: Opens what answers the lines, once the files are open.
        report: Gets the progress.
        outcome: Filled in.

    Raises:
        ConfigError: The files or the model cannot be used as asked.
        StagedPoolError: The model or the server can go on no more.
        OSError: A file failed.
    """
    stop = anyio.Event()
    with single_errors():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_obey_signals, stop, tasks.cancel_scope, outcome)
            outcome.summary = await _run(batch, side, report, stop)
            tasks.cancel_scope.cancel()


async def _obey_signals(stop: anyio.Event, running: anyio.CancelScope, outcome: Outcome) -> None:
    with interrupts() as signals:
        async for number in signals:
            if stop.is_set():
                running.cancel()
            outcome.signal = number
            stop.set()
            click.echo("stopping: the lines in work are finished first; a second signal drops them", err=True)


async def _run(
    batch: Batch, side: AbstractAsyncContextManager[Side], report: Callable[[Progress], None], stop: anyio.Event
) -> Summary:
    if batch.source_format == "batch":
        opening = partial(
            open_batch,
            source=batch.source,
            output=batch.output,
            errors=batch.errors,
            identity=batch.identity(),
            existing=batch.existing,
        )
        async with job_files(opening) as job, side as answering:
            work = answering.batch_work(BatchAnswers(job.journal.id))
            return await job.run(work, window=answering.window(BATCH_WINDOW), report=report, stop=stop)
    opening_texts = partial(
        open_texts,
        source=batch.source,
        output=batch.output,
        errors=batch.errors,
        formats=TextFormats(batch.source_format, batch.output_format, batch.column),
        identity=batch.identity(),
        existing=batch.existing,
    )
    async with job_files(opening_texts) as texts, side as answering:
        text_work = TextWork(answering.text_call(batch))
        window = answering.window(text_window(batch.items_each))
        return await texts.run(text_work, window=window, report=report, stop=stop)
