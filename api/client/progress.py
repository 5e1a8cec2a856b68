"""How far a call of many inputs has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Progress: TypeAlias = bool | Callable[[int, int], None]
"""True: a bar on standard error, where that is a terminal. Or a function, which is told how many inputs are done, and
of how many. That of a `Client` is called in its threads, one call at a time."""


@contextmanager
def shown(progress: Progress, total: int) -> Iterator[Callable[[int], None]]:
    """Gives what is to be told how many more inputs are done."""
    if progress is False:
        yield lambda count: None
        return
    done = 0
    if progress is not True:
        told = progress

        def advance(count: int) -> None:
            nonlocal done
            done += count
            told(done, total)

        yield advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Without its own thread: nothing is left behind, and it is drawn when something has changed.
    with Bar(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("", total=total)

        def draw(count: int) -> None:
            bar.update(task, advance=count, refresh=True)

        yield draw
