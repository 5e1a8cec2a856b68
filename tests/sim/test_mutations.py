"""Each planted bug is noticed by the world that is kept for it: a bug of no world, or a stale world, fails."""

from __future__ import annotations

import pytest

from tests.sim.equivalent import EQUIVALENT
from tests.sim.kills import again, kept, names
from tests.sim.mutants import MUTANTS


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """Do not watch for blocking calls: the simulator has no sockets, threads or real time."""


KEPT = kept()


@pytest.mark.parametrize("name", names())
def test_a_planted_bug_is_noticed(name: str) -> None:
    assert name in KEPT, "no world is kept for it: `python -m tests.sim --mutants --register` looks for one"
    violations, own_errors = again(name, KEPT[name])
    assert violations, "the world is stale: `python -m tests.sim --mutants --register` looks for another one"
    assert not own_errors, "it dies of an error of its own, and so is no mutant"


def test_only_existing_mutants_are_listed() -> None:
    assert not EQUIVALENT.keys() - MUTANTS.keys()
    assert not KEPT.keys() - set(names())
