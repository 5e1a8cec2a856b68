"""`python -m tests.sim`: many seeds, or one of them in every detail."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.sim.clock import BACKENDS, Backend
from tests.sim.mutations import MUTATIONS, first_kill
from tests.sim.running import Report, prepared, run_block, run_seed

BLOCK = 100
"""Seeds that a process takes at once."""

START_S = 120.0
"""What the processes get to start."""


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 if a seed has failed; each failure is printed with the command that repeats it."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many (default: %(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first one (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--backend", choices=("trio", "asyncio"), help="default: every other seed each")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--mutations", action="store_true", help="which seed is the first to notice each planted bug")
    parser.add_argument("--verbose", action="store_true", help="with --seed: print what happens")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _one(options.seed, options.backend or "trio", verbose=options.verbose)
    if options.mutations:
        return _mutations(range(options.start, options.start + options.seeds))
    return _many(options.start, options.seeds, options.backend, options.jobs)


def _one(seed: int, backend: Backend, *, verbose: bool) -> int:
    console = Console(highlight=False, soft_wrap=True)
    with prepared():
        report = run_seed(seed, backend, verbose=verbose)
    for line in report.trace:
        console.print(line, markup=False)
    _print(console, report)
    return bool(report.violations)


def _print(console: Console, report: Report) -> None:
    for violation in report.violations:
        console.print(violation, markup=False, style="red")
    outcomes = ", ".join(f"{count} {kind}" for kind, count in report.outcomes.most_common())
    console.print(f"seed {report.seed} on {report.backend}: {'FAILED' if report.violations else 'ok'} ({outcomes})")


def _mutations(seeds: range) -> int:
    """Exit status 1 if one survives on both backends."""
    survivors = 0
    for name in MUTATIONS:
        for backend in BACKENDS:
            if report := first_kill(name, seeds, backend):
                print(f'    "{name}": ("{backend}", {report.seed}),  # {report.violations[0]}', flush=True)
                break
        else:
            survivors += 1
            print(f"    {name} survives", flush=True)
    return bool(survivors)


def _blocks(start: int, seeds: int, backend: Backend | None) -> Iterator[tuple[range, Backend]]:
    """With both backends, a seed is always run on the same one."""
    backends = BACKENDS if backend is None else (backend,)
    for first in range(start, start + seeds, BLOCK):
        yield range(first, min(first + BLOCK, start + seeds)), backends[first // BLOCK % len(backends)]


def _many(start: int, seeds: int, backend: Backend | None, jobs: int) -> int:
    console = Console(highlight=False, soft_wrap=True)
    outcomes: Counter[str] = Counter()
    failures = 0
    spawning = multiprocessing.get_context("spawn")
    ready = spawning.Barrier(jobs + 1, timeout=START_S)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with spawning.Pool(jobs, ready.wait) as pool, Progress(*columns, console=console) as progress:
        ready.wait()  # imports are not what is measured
        began = time.perf_counter()
        task = progress.add_task("seeds", total=seeds)
        for count, failed, tally in pool.imap_unordered(run_block, _blocks(start, seeds, backend)):
            outcomes += tally
            failures += len(failed)
            for report in failed:
                _print(progress.console, report)
                progress.console.print(f"  {report.command}")
            progress.update(task, advance=count, description=f"seeds, {failures} failed")
        took_s = time.perf_counter() - began
    console.print(f"{seeds} seeds in {took_s:.0f} s, {seeds / took_s:.0f} a second; {failures} failed")
    console.print(", ".join(f"{count} {kind}" for kind, count in outcomes.most_common()))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
