"""`python -m tests.sim`: many seeds, or one of them in every detail."""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.sim import covered
from tests.sim.clock import BACKENDS, Backend
from tests.sim.draw import draw
from tests.sim.running import Report, prepared, run_block, run_json, smallest
from tests.sim.shrink import deviations
from tests.sim.world import to_json

OTHER_WORLDS = {
    "batches": "batches beside other callers with little memory",
    "fleet": "a supervisor and its processes",
    "lines": "fronts and an engine process",
    "pipes": "a pipeline on two engines",
    "plugins": "a plugin with bad hooks",
    "web": "HTTP connections",
    "workers": "a pool of worker processes",
}
"""Kinds of worlds beside those of an engine, in words. Each has a folder here."""

BLOCK = 100
"""Seeds that a process takes at once."""

SHRUNK = 5
"""Maximum number of failures whose worlds are shrunk; for further ones only the seed is printed."""

START_S = 120.0
"""Timeout for the start of the processes, in seconds."""


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 if a seed has failed; each failure is printed with the command that repeats it."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many (default: %(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first one (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--world", type=Path, help="only the world in this file of JSON")
    parser.add_argument("--backend", choices=("trio", "asyncio"), help="default: every other seed each")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    for name, help_text in OTHER_WORLDS.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"worlds of {help_text}, and not of an engine")
    parser.add_argument("--mutants", action="store_true", help="whether each planted bug is noticed by its kept world")
    parser.add_argument("--register", action="store_true", help="with --mutants: look for other worlds where it is not")
    parser.add_argument("--only", default="", help="with --mutants: those whose name has this in it")
    parser.add_argument("--coverage", action="store_true", help="which lines of the engine the seeds never reach")
    parser.add_argument("--verbose", action="store_true", help="with --seed or --world of an engine: what happens")
    parser.add_argument("--whole", action="store_true", help="print a failing world as it is, and not the smallest one")
    options = parser.parse_args(arguments)
    if options.seed is not None or options.world is not None:
        kind = _kind(options)
        given = to_json(kind.draw(options.seed)) if options.world is None else json.loads(options.world.read_text())
        return _one(kind, given, options.backend, verbose=options.verbose, whole=options.whole)
    if options.mutants:
        return _mutants(jobs=options.jobs, register=options.register, only=options.only)
    if options.coverage:
        print(*covered.shown(covered.never_reached(range(options.start, options.start + options.seeds))), sep="\n")
        return 0
    return _many(_kind(options), options.start, options.seeds, options.backend, options.jobs)


@dataclass(frozen=True)
class Kind:
    """A kind of worlds, and the way to run them."""

    name: str
    """Empty: worlds of an engine, the only ones that tell what happens in them."""
    draw: Callable[[int], Any]
    run: Callable[..., Report]
    """JSON of a world, and the backend."""
    run_block: Callable[[tuple[Sequence[int], Backend]], tuple[int, list[Report], Counter[str]]]


def _kind(options: argparse.Namespace) -> Kind:
    for name in OTHER_WORLDS:
        if getattr(options, name):  # imported only then: a server takes longer to import than the engine
            plan = importlib.import_module(f"tests.sim.{name}.plan")
            running = importlib.import_module(f"tests.sim.{name}.running")
            return Kind(name, plan.draw, getattr(running, f"run_{name}_json"), getattr(running, f"run_{name}_block"))
    return Kind("", draw, run_json, run_block)


def _one(kind: Kind, given: Any, backend: Backend | None, *, verbose: bool, whole: bool) -> int:
    """Run one world, on both backends if none is named. If it fails, print the smallest world that does."""
    console = Console(highlight=False, soft_wrap=True)
    failed = False
    with prepared():
        for each in (backend,) if backend is not None else BACKENDS:
            report = kind.run(given, each, verbose=True) if verbose and not kind.name else kind.run(given, each)
            for line in report.trace:
                console.print(line, markup=False)
            _print(console, report)
            if report.violations:
                failed = True
                _print_world(console, kind, given, report, whole=whole)
    return failed


def _print(console: Console, report: Report) -> None:
    for violation in report.violations:
        console.print(violation, markup=False, style="red")
    outcomes = ", ".join(f"{count} {kind}" for kind, count in report.outcomes.most_common())
    console.print(f"seed {report.seed} on {report.backend}: {'FAILED' if report.violations else 'ok'} ({outcomes})")


def _command(kind: Kind, report: Report) -> str:
    """Return the command that repeats a failure."""
    if not kind.name:
        return report.command
    return f"python -m tests.sim --{kind.name} --seed {report.seed} --backend {report.backend}"


def _print_world(console: Console, kind: Kind, world: Any, report: Report, *, whole: bool) -> None:
    """Print the JSON of a failing world, or of the smallest one that fails alike."""
    given = world if whole else smallest(world, report, run=kind.run)
    console.print(f"  {deviations(given)} deviations from a plain world, on {report.backend}; for --world:")
    console.print(f"  {json.dumps(given)}", markup=False)
    for violation in kind.run(given, report.backend).violations:
        console.print(f"  {violation}", markup=False)


def _mutants(*, jobs: int, register: bool, only: str) -> int:
    """Return exit status 1 if a mutant survives, fails by itself, or goes unnoticed."""
    from tests.sim import kills  # the mutants are made when it is imported

    names = [name for name in kills.names() if only in name]
    stale = [name for name in names if kills.is_stale(name)]
    for name in stale:
        print(f"    {name}: no kept world notices it", flush=True)
    if not register:
        return bool(stale)
    kept, wrong = kills.kept(), 0
    for name, found in kills.searched(stale, jobs):
        if isinstance(found, kills.Kill):
            kept[name] = found
            kills.keep({name: kept[name] for name in kills.names() if name in kept})
            print(f"    {name}: seed {found.seed}, {found.violation}", flush=True)
        else:
            wrong += 1
            why = "survives" if found is None else f"is no mutant: {found}"
            print(f"    {name} {why}", flush=True)
    return bool(wrong)


def _blocks(start: int, seeds: int, backend: Backend | None) -> Iterator[tuple[range, Backend]]:
    """With both backends, a seed is always run on the same one."""
    backends = BACKENDS if backend is None else (backend,)
    for first in range(start, start + seeds, BLOCK):
        yield range(first, min(first + BLOCK, start + seeds)), backends[first // BLOCK % len(backends)]


def _many(kind: Kind, start: int, seeds: int, backend: Backend | None, jobs: int) -> int:
    console = Console(highlight=False, soft_wrap=True)
    outcomes: Counter[str] = Counter()
    failures = 0
    spawning = multiprocessing.get_context("spawn")
    ready = spawning.Barrier(jobs + 1, timeout=START_S)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with spawning.Pool(jobs, ready.wait) as pool, Progress(*columns, console=console) as progress:
        ready.wait()  # imports are not measured
        began = time.perf_counter()
        task = progress.add_task("seeds", total=seeds)
        for count, failed, tally in pool.imap_unordered(kind.run_block, _blocks(start, seeds, backend)):
            outcomes += tally
            failures += len(failed)
            for report in failed:
                _print(progress.console, report)
                progress.console.print(f"  {_command(kind, report)}")
                if failures <= SHRUNK and not report.violations[0].startswith("something was left"):
                    with prepared():
                        _print_world(progress.console, kind, to_json(kind.draw(report.seed)), report, whole=False)
            progress.update(task, advance=count, description=f"seeds, {failures} failed")
        took_s = time.perf_counter() - began
    console.print(f"{seeds} seeds in {took_s:.0f} s, {seeds / took_s:.0f} a second; {failures} failed")
    console.print(", ".join(f"{count} {kind}" for kind, count in outcomes.most_common()))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
