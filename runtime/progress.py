"""Progress of a call of many inputs: a bar, or a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from rich.progress import Task
    from rich.text import Text

Progress: TypeAlias = bool | Callable[[int, int], None]
"""Progress of a call. True: a bar on standard error; where that is no terminal, one line at the end. False: none.

Or a function of the number of inputs done and their total. A `Client` calls it from its threads, one call at a time.
"""

UNKNOWN_TOTAL: Final = -1
"""Total for a function of progress, where it is unknown, as for a generator."""


@contextmanager
def reporting(progress: Progress, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of inputs that were just done.

    Args:
        progress: Bar or function.
        total: Number of inputs. None: unknown.
    """
    if progress is False:
        yield lambda count: None
        return
    done = 0
    if progress is not True:
        report = progress

        def advance(count: int) -> None:
            nonlocal done
            done += count
            report(done, UNKNOWN_TOTAL if total is None else total)

        yield advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    class Rate(ProgressColumn):
        """Inputs a second."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.0f}/s")

    columns = (BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn(elapsed_when_finished=True))
    # Without a thread of its own, which could outlive the call: the bar is drawn at each change.
    with Bar(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("", total=total)

        def draw(count: int) -> None:
            bar.update(task, advance=count, refresh=True)

        yield draw
