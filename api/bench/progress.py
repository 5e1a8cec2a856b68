"""One line of progress on a terminal, at most four times a second."""

from __future__ import annotations

from typing import Final

import anyio
from rich.console import Console
from rich.live import Live
from rich.text import Text

from staged_pool.api.bench.bench import Bench
from staged_pool.api.bench.level import Level
from staged_pool.api.bench.records import OK, REJECTED, UNFINISHED

REDRAW_S: Final = 0.25
"""Seconds between two drawings. A line takes about a millisecond, which the load has to wait."""


async def show_progress(bench: Bench, console: Console) -> None:
    """Show the progress of a measurement until it is cancelled; without a terminal, nothing."""
    if not console.is_terminal:
        return
    # Without a thread of its own, which would take the lock of the interpreter from the load at any time.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(Text(progress_line(bench)), refresh=True)
            await anyio.sleep(REDRAW_S)


def progress_line(bench: Bench) -> str:
    """Return the line: the level, its time, and the counts of its requests so far."""
    if not bench.levels:
        return "asking the server"
    level = bench.levels[-1]
    return f"level {len(bench.levels)}: {level.plan}, {_phase(level, level.elapsed_s)}; {_counts(level)}"


def _phase(level: Level, elapsed_s: float) -> str:
    plan = level.plan
    if elapsed_s < plan.warmup_s:
        return f"warm-up {elapsed_s:.0f} of {plan.warmup_s:g} s"
    if elapsed_s >= plan.seconds:
        return "waiting for the last answers"
    number = int((elapsed_s - plan.warmup_s) // plan.round_s) + 1
    return f"round {number} of {plan.rounds}, {elapsed_s:.0f} of {plan.seconds:g} s"


def _counts(level: Level) -> str:
    counts = level.records.statuses
    failed = sum(counts.values()) - counts[OK] - counts[REJECTED] - counts[UNFINISHED]
    return f"{counts[OK]:,} answered, {counts[REJECTED]:,} rejected, {failed:,} failed"
