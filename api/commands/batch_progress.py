"""Progress of `run-batch` on stderr: a bar on a terminal, and one last line anywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from staged_pool.api.bulk.job import Progress, Summary

REDRAW_S: Final = 0.1
"""Seconds between two drawings of the bar."""


@contextmanager
def showing_progress() -> Iterator[Callable[[Progress], None]]:
    """Yield the function that gets the progress. Without a terminal, it shows nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda progress: None
        return
    counts = TextColumn("{task.fields[lines]:,} lines, {task.fields[failed]:,} failed")
    rates = TextColumn("{task.fields[rate]:,.0f} lines/s")
    columns = (BarColumn(), TaskProgressColumn(), counts, rates, TimeRemainingColumn())
    # Without a thread of its own: the bar is drawn when there is progress.
    with Bar(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task("", total=1.0, lines=0, failed=0, rate=0.0)
        drawn_at = 0.0

        def draw(progress: Progress) -> None:
            nonlocal drawn_at
            now, lines = time.monotonic(), progress.completed + progress.failed
            if now - drawn_at < REDRAW_S and progress.share < 1.0:
                return
            drawn_at = now
            share, rate, failed = progress.share, progress.rate, progress.failed
            bar.update(task, completed=share, lines=lines, failed=failed, rate=rate, refresh=True)

        yield draw


def print_summary(summary: Summary, output: str) -> None:
    """Print one line about a run."""
    here = summary.completed + summary.failed - summary.resumed
    rate = here / summary.seconds if summary.seconds else 0.0
    before = f" ({summary.resumed:,} by earlier runs)" if summary.resumed else ""
    end = f"written to {output}" if summary.finished else "so far"
    click.echo(
        f"{summary.completed:,} lines done and {summary.failed:,} failed{before}, {end}: "
        f"{summary.seconds:.1f} s, {rate:,.0f} lines/s",
        err=True,
    )
