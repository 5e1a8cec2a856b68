"""The world that notices each planted bug: found among the first seeds, shrunk, and kept in `kills.json`.

A bug is planted by hand (`mutations`) or made from the source (`mutants`). A kept world that no longer notices its bug
is stale, and fails the tests: `python -m tests.sim --mutants --register` looks for another one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.sim import mutants, mutations, order
from tests.sim.clock import BACKENDS, Backend
from tests.sim.draw import draw
from tests.sim.equivalent import EQUIVALENT
from tests.sim.running import COLLECT_EVERY, OWN_ERRORS, collect_garbage, prepared, run_json, run_seed, smallest
from tests.sim.web.plan import draw as draw_web
from tests.sim.web.running import run_web_json, run_web_seed
from tests.sim.world import to_json

KEPT = Path(__file__).with_name("kills.json")

SEEDS = 2000
"""Number of seeds within which each planted bug must be noticed."""

SHRINKING_RUNS = 60
"""Maximum runs to shrink the world of a kill: enough for most of them, and quick."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A world that notices a planted bug."""

    seed: int
    backend: Backend | Literal["order"]
    """`order`: the comparison of orders notices it, with this seed."""
    violation: str
    world: Any
    """JSON of the world; None for a comparison of orders."""
    is_web: bool = False
    """True if it is a world of connections."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def names() -> list[str]:
    """Return the names of all planted bugs that a world must notice."""
    return [*mutations.MUTATIONS, *(name for name in mutants.MUTANTS if name not in EQUIVALENT)]


def planted(name: str) -> AbstractContextManager[None]:
    """Plant a bug during the block."""
    return mutations.planted(name) if name in mutations.MUTATIONS else mutants.planted(name)


def kept() -> dict[str, Kill]:
    """Read the kept kills, by name of the bug."""
    return {name: Kill(**kill) for name, kill in json.loads(KEPT.read_text()).items()} if KEPT.exists() else {}


def keep(kills: dict[str, Kill]) -> None:
    """Write the kills, one line each."""
    lines = [f"{json.dumps(name)}: {json.dumps(kill.to_json())}" for name, kill in kills.items()]
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def again(name: str, kill: Kill) -> tuple[Sequence[str], Sequence[str]]:
    """Run the kept world: return the violations it finds, and the errors that the bug itself raises."""
    with prepared(), planted(name):
        if kill.backend == "order":
            wrong, is_own = _wrong_order(kill.seed)
            return [] if wrong is None else [wrong], [wrong] if wrong is not None and is_own else []
        report = (run_web_json if kill.is_web else run_json)(kill.world, kill.backend)
        collect_garbage()  # the bug's leftovers must not warn in the caller
    return report.violations, report.own_errors


def _wrong_order(seed: int) -> tuple[str | None, bool]:
    """Compare orders for a seed; return what differs, and if the bug itself raised it."""
    try:
        return order.check(seed), False
    except Exception as error:  # noqa: BLE001  # a planted bug may raise anything
        return repr(error), isinstance(error, OWN_ERRORS)


def search(name: str) -> tuple[str, Kill | str | None]:
    """The first seed that notices a bug, and the smallest world found that does, too.

    Returns:
        The name, and the kill. A text: the error of its own of which the bug has died, so that it is no mutant. None:
        it survives.
    """
    is_web = name in mutations.OF_CONNECTIONS
    with prepared():
        for seed in range(SEEDS):
            backend = BACKENDS[seed // 10 % len(BACKENDS)]
            with planted(name):
                wrong, is_own = (None, False) if is_web else _wrong_order(seed)
                report = (run_web_seed if is_web else run_seed)(seed, backend) if wrong is None else None
                if seed % COLLECT_EVERY == 0 or (report is not None and report.violations):
                    collect_garbage()
            if wrong is not None:
                return name, wrong if is_own else Kill(seed, "order", wrong, None)
            assert report is not None
            if report.own_errors:
                return name, report.own_errors[0]
            if report.violations and not (run_web_seed if is_web else run_seed)(seed, backend).violations:
                bug = functools.partial(planted, name)
                drawn, run = (to_json(draw_web(seed)), run_web_json) if is_web else (to_json(draw(seed)), run_json)
                world = smallest(drawn, report, most_runs=SHRINKING_RUNS, bug=bug, run=run)
                return name, Kill(seed, backend, report.violations[0], world, is_web)
    return name, None


def searched(wanted: Iterable[str], jobs: int) -> Iterator[tuple[str, Kill | str | None]]:
    """Run `search` for many bugs in several processes; yield results as they come."""
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(search, wanted)


def is_stale(name: str) -> bool:
    """True if no kept world notices a bug by more than the bug's own errors."""
    kill = kept().get(name)
    if kill is None:
        return True
    violations, own_errors = again(name, kill)
    return not violations or bool(own_errors)
