"""Progress of a call of many inputs: a bar, or a function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from rich.progress import Task

Progress: TypeAlias = bool | Callable[[int, int], None]
"""Progress of a call. True: a bar on standard error; where that is no terminal, one line at the end. False: none.

Or a function of the number of inputs done and their total. A `Client` calls it from its threads, one call at a time.
"""

UNKNOWN_TOTAL: Final = -1
"""Total for a function of progress, where it is unknown, as for a generator."""


@contextmanager
def reporting(
    progress: Progress, total: int | None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of inputs that were just done.

    Args:
        progress: Bar or function.
        total: Number of inputs. None: unknown.
        clock: Seconds; the rate counts from the beginning of the block, when the first input goes in.
    """
    if progress is False:
        yield lambda count: None
    elif progress is True:
        with _bar(total, clock) as draw:
            yield draw
    else:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress(done, UNKNOWN_TOTAL if total is None else total)

        yield advance


@contextmanager
def _bar(total: int | None, clock: Callable[[], float]) -> Iterator[Callable[[int], None]]:
    """Draw a bar; yield a function that moves it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    # The columns of rich measure the rate between the last steps, of which a call of a few requests has none.
    class Rate(ProgressColumn):
        """Inputs a second, since the first one went in."""

        def render(self, task: Task) -> Text:
            return Text(f"{task.completed / task.elapsed:,.0f}/s" if task.completed and task.elapsed else "")

    class Left(ProgressColumn):
        """Time left at that rate; behind the last input, the time that all of them took."""

        def render(self, task: Task) -> Text:
            elapsed, total, done = task.elapsed or 0.0, task.total, task.completed
            if task.finished:
                return Text(str(timedelta(seconds=round(elapsed))))
            if total is None or not done:
                return Text("-:--:--")
            return Text(str(timedelta(seconds=round(elapsed * (total / done - 1)))))

    # Without a thread of its own, which could outlive the call: the bar is drawn at each change. In a notebook rich
    # would want widgets, so the bar is plain text there, too.
    console = Console(stderr=True, force_jupyter=False)
    columns = (BarColumn(), MofNCompleteColumn(), Rate(), Left())
    with Bar(*columns, console=console, auto_refresh=False, get_time=clock) as bar:
        task = bar.add_task("", total=total)

        def draw(count: int) -> None:
            bar.update(task, advance=count, refresh=True)

        yield draw
