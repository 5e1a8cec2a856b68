"""Running one world, or a block of them."""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import anyio
import structlog

from tests.sim import internals, outcomes
from tests.sim.clock import Backend, Stuck, run
from tests.sim.doubles import Machine
from tests.sim.draw import draw
from tests.sim.harness import Simulation
from tests.sim.shrink import MOST_RUNS, shrunk, way
from tests.sim.watch import Watch, WatchedTicket
from tests.sim.world import World, from_json
from tests.support.logs import logs_to

COLLECT_EVERY = 5
"""Runs between two garbage collections."""

OWN_ERRORS = (TypeError, NameError, AttributeError, ImportError)
"""Programming errors: a world that logs one fails, and a mutant that raises one does not count."""

MUTANT = "<mutant>"
"""File name in the code of a mutant."""

_SIGNATURE = re.compile(r"takes .* positional argument|unexpected keyword argument|missing .* required")


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one world."""

    seed: int
    backend: Backend
    violations: tuple[str, ...]
    trace: tuple[str, ...]
    outcomes: Counter[str]
    own_errors: tuple[str, ...] = ()
    """Errors of `OWN_ERRORS` that were raised in a mutant's own code."""

    def command(self, world: str = "") -> str:
        """Return the command that repeats it.

        Args:
            world: Its kind, such as `lines`; empty for an engine, whose run can be printed in every detail.
        """
        how = f"--{world}" if world else "--verbose"
        return f"python -m tests.sim --seed {self.seed} --backend {self.backend} {how}"


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Set up a run of seeds: logs are not rendered, and garbage is collected on request only.

    It may be entered again inside itself. What was there before the outermost one is never looked through for garbage:
    with torch and transformers among it that takes longer than many seeds.
    """
    is_outermost = gc.isenabled()
    gc.collect()
    if is_outermost:
        gc.freeze()
        gc.disable()
    try:
        with logs_to(_drop):
            yield
    finally:
        if is_outermost:
            gc.enable()


LOGGED: Counter[str] = Counter()
SLIPS: list[tuple[str, bool]] = []
"""Errors of `OWN_ERRORS`, each with True if a mutant's own code raised it."""


def _drop(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    LOGGED[event["event"]] += 1
    error = event.get("exc_info")
    if error is True:
        error = sys.exc_info()[1]
    if isinstance(error, BaseException):
        SLIPS.extend(slips(error))
    raise structlog.DropEvent


def slips(error: BaseException) -> list[tuple[str, bool]]:
    """Return the programming errors in an error, its causes and its group."""
    found: list[tuple[str, bool]] = []
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        if (one := left.pop()) is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, OWN_ERRORS):
            found.append((repr(one), _is_of_a_mutant(one)))
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
        left += [one.__cause__, one.__context__]
    return found


def _is_of_a_mutant(error: BaseException) -> bool:
    """True if a mutant itself raised an error; False if others raised it because of the mutant."""
    if isinstance(error, NameError | ImportError) or _SIGNATURE.search(str(error)):
        return True
    where = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        where = frame.f_code.co_filename
    return where is not None and (where == MUTANT or where.endswith("tests/sim/mutations.py"))


def run_seed(seed: int, backend: Backend, *, verbose: bool = False) -> Report:
    """Run one world. Call it inside `prepared()`; call `collect_garbage` now and then."""
    return run_world(draw(seed), backend, verbose=verbose)


def run_world(world: World, backend: Backend, *, verbose: bool = False) -> Report:
    """Run a world that is drawn already."""
    watches: list[Watch] = []

    async def main() -> None:
        machine = Machine(world)
        simulations = [Simulation(world, machine, verbose=verbose)]
        if world.neighbour is not None:
            simulations.append(Simulation(world.neighbour, machine, verbose=verbose))
        watches.extend(simulation.watch for simulation in simulations)
        async with anyio.create_task_group() as engines:
            for simulation in simulations:
                engines.start_soon(simulation.run)
        if machine.borrowed:
            watches[0].fail(f"{machine.borrowed} limiter tokens are gone")

    violations: list[str] = []
    LOGGED.clear()
    SLIPS.clear()
    with internals.engine_made_for(world, WatchedTicket):
        try:
            violations += [f"never retrieved: {error}" for error in run(main, backend=backend, seed=world.seed)]
        except (Stuck, Exception) as error:  # noqa: BLE001  # whatever leaves the program is a finding
            SLIPS.extend(slips(error))
            violations.append(f"the program ended by {error!r}, {error.__cause__!r}")
    if lost := LOGGED["stage.lost_request"]:
        violations.append(f"custody was left with {lost} forgotten hand-overs")
    violations += [f"a slip: {slip}" for slip, _ in SLIPS]
    own_errors = tuple(slip for slip, is_of_a_mutant in SLIPS if is_of_a_mutant)
    trace = [line for watch in watches for line in watch.trace]
    found = [violation for watch in watches for violation in watch.violations]
    counted = sum((outcomes.tally(watch) for watch in watches), Counter[str]())
    return Report(world.seed, backend, (*found, *violations), tuple(trace), counted, own_errors)


def run_json(given: Any, backend: Backend, *, verbose: bool = False) -> Report:
    """Run the world that a JSON value describes."""
    return run_world(from_json(given), backend, verbose=verbose)


def smallest(
    world: Any,
    report: Report,
    *,
    most_runs: int = MOST_RUNS,
    bug: Callable[[], AbstractContextManager[None]] | None = None,
    run: Callable[[Any, Backend], Report] = run_json,
) -> Any:
    """JSON of the smallest world that fails as this one does. Call it inside `prepared()`.

    Args:
        world: JSON of one that fails.
        report: Of that.
        most_runs: See `shrunk`.
        bug: What plants the bug that it fails by: without that, a smaller world must not fail.
        run: What runs a world.
    """
    first = way(report.violations[0])

    def runs(given: Any) -> Report | None:
        try:
            return run(given, report.backend)
        except (ValueError, LookupError, TypeError, AttributeError):  # it is no world
            return None
        finally:
            collect_garbage()

    def fails(given: Any) -> bool:
        with nullcontext() if bug is None else bug():
            again = runs(given)
        if again is None or again.own_errors or all(way(violation) != first for violation in again.violations):
            return False
        return bug is None or ((well := runs(given)) is not None and not well.violations)

    return shrunk(world, fails, most_runs=most_runs)


def collect_garbage() -> list[str]:
    """Collect what runs have left; what that brings to light, such as a stream that was never closed."""
    found: list[str] = []
    hook = sys.unraisablehook

    def note(unraisable: Any) -> None:
        found.append(f"{unraisable.exc_value!r}")

    sys.unraisablehook = note
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gc.collect()
    finally:
        sys.unraisablehook = hook
    return found


def run_block(
    block: tuple[Sequence[int], Backend], run: Callable[[int, Backend], Report] = run_seed
) -> tuple[int, list[Report], Counter[str]]:
    """Run several seeds, and look for leftovers such as threads and garbage.

    Args:
        block: The seeds and the backend: one argument, for the pools of multiprocessing.
        run: What runs one.

    Returns:
        How many seeds; those that failed; and how often each kind of outcome came about in all of them.
    """
    seeds, backend = block
    failed: list[Report] = []
    counted: Counter[str] = Counter()
    with prepared():
        for seed in seeds:
            report = run(seed, backend)
            counted += report.outcomes
            if report.violations:
                failed.append(report)
            if seed % COLLECT_EVERY == 0 or seed == seeds[-1]:
                for left in collect_garbage():
                    found = f"something was left behind within {COLLECT_EVERY} seeds up to this one: {left}"
                    failed.append(Report(seed, backend, (found,), (), Counter()))
    return len(seeds), failed, counted
