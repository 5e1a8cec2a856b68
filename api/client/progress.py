"""Progress of a call of many inputs: a bar, or a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Progress: TypeAlias = bool | Callable[[int, int], None]
"""Progress of a call. True: a bar on standard error, if that is a terminal. False: none.

Or a function of the number of inputs done and their total. A `Client` calls it from its threads, one call at a time.
"""


@contextmanager
def reporting(progress: Progress, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of inputs that were just done."""
    if progress is False:
        yield lambda count: None
        return
    done = 0
    if progress is not True:
        report = progress

        def advance(count: int) -> None:
            nonlocal done
            done += count
            report(done, total)

        yield advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Without a thread of its own, which could outlive the call: the bar is drawn at each change.
    with Bar(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("", total=total)

        def draw(count: int) -> None:
            bar.update(task, advance=count, refresh=True)

        yield draw
