"""Running one seed, or a block of them."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from staged_pool.runtime import engine as engine_module
from staged_pool.runtime import lanes
from staged_pool.runtime import pipeline as pipeline_module
from staged_pool.stages.ticket import Ticket
from tests.doubles import logs_to
from tests.sim.clock import Backend, Stuck, run
from tests.sim.harness import Simulation
from tests.sim.invariants import Watch, WatchedTicket
from tests.sim.world import World, draw

COLLECT_EVERY = 5
"""Runs between two garbage collections."""


@dataclass(frozen=True, slots=True)
class Report:
    """What came of one seed."""

    seed: int
    backend: Backend
    violations: tuple[str, ...]
    trace: tuple[str, ...]
    outcomes: Counter[str]

    @property
    def command(self) -> str:
        return f"python -m tests.sim --seed {self.seed} --backend {self.backend} --verbose"


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """What runs of seeds share: no rendering of logs, and a garbage collector that waits until it is called.

    It may be entered again inside itself. What was there before the outermost one is never looked through for garbage:
    with torch and transformers among it that takes longer than many seeds.
    """
    was_enabled, is_outermost = gc.isenabled(), not gc.get_freeze_count()
    gc.collect()
    if is_outermost:
        gc.freeze()
    gc.disable()
    try:
        with logs_to(_drop):
            yield
    finally:
        if was_enabled:
            gc.enable()
        if is_outermost:
            gc.unfreeze()


LOGGED: Counter[str] = Counter()


def _drop(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    LOGGED[event["event"]] += 1
    raise structlog.DropEvent


def run_seed(seed: int, backend: Backend, *, verbose: bool = False) -> Report:
    """Run one world. Call it inside `prepared()`; call `collect_garbage` now and then."""
    return run_world(draw(seed), backend, verbose=verbose)


def run_world(world: World, backend: Backend, *, verbose: bool = False) -> Report:
    """Run a world that is drawn already."""
    watches: list[Watch] = []

    async def main() -> None:
        simulation = Simulation(world, verbose=verbose)
        watches.append(simulation.watch)
        await simulation.run()

    def ticket(*args: Any, **kwargs: Any) -> WatchedTicket:
        made = WatchedTicket(*args, **kwargs)
        made.watch, made.times = watches[0], []
        watches[0].ticket_made(made)
        return made

    violations: list[str] = []
    was = (
        Ticket,
        pipeline_module.PARSE_WORKERS,
        pipeline_module.POSTPROCESS_WORKERS,
        lanes.MIN_SHARE_TOKENS,
        lanes.IMAGE_MIN_SHARE_TOKENS,
    )
    _set_engine(ticket, world.parse_workers, world.postprocess_workers, world.min_share_tokens, world.min_share_tokens)
    LOGGED.clear()
    try:
        violations += [f"never retrieved: {error}" for error in run(main, backend=backend, seed=world.seed)]
    except (Stuck, Exception) as error:  # noqa: BLE001  # whatever leaves the program is a finding
        violations.append(f"the program ended by {error!r}, {error.__cause__!r}")
    finally:
        _set_engine(*was)
    watch = watches[0]
    if lost := LOGGED["stage.lost_request"]:
        violations.append(f"custody was left with {lost} forgotten hand-overs")
    return Report(world.seed, backend, (*watch.violations, *violations), tuple(watch.trace), watch.tally())


def _set_engine(
    ticket: object, parse_workers: int, postprocess_workers: int, min_share_tokens: int, image_min_share_tokens: int
) -> None:
    for module, name, value in (
        (engine_module, "Ticket", ticket),
        (pipeline_module, "PARSE_WORKERS", parse_workers),
        (pipeline_module, "POSTPROCESS_WORKERS", postprocess_workers),
        (lanes, "MIN_SHARE_TOKENS", min_share_tokens),
        (lanes, "IMAGE_MIN_SHARE_TOKENS", image_min_share_tokens),
    ):
        setattr(module, name, value)


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


def run_block(block: tuple[Sequence[int], Backend]) -> tuple[int, list[Report], Counter[str]]:
    """Run several seeds, and look for what they have left behind. One argument, for the pools of multiprocessing.

    Returns:
        How many seeds; those that failed; and how often each kind of outcome came about in all of them.
    """
    seeds, backend = block
    failed: list[Report] = []
    outcomes: Counter[str] = Counter()
    with prepared():
        for seed in seeds:
            report = run_seed(seed, backend)
            outcomes += report.outcomes
            if report.violations:
                failed.append(report)
            if seed % COLLECT_EVERY == 0 or seed == seeds[-1]:
                for left in collect_garbage():
                    found = f"something was left behind within {COLLECT_EVERY} seeds up to this one: {left}"
                    failed.append(Report(seed, backend, (found,), (), Counter()))
    return len(seeds), failed, outcomes
