"""Each planted bug is noticed within 2,000 seeds."""

from __future__ import annotations

import pytest

from tests.sim.mutations import MUTATIONS, first_kill
from tests.sim.seeds import KILLS


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """Nothing here could: there are no sockets, no threads and no time."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_noticed(name: str) -> None:
    backend, seed = KILLS.get(name, ("trio", 0))
    report = first_kill(name, (seed,), backend) or first_kill(name, range(2000), backend)
    assert report, "survives; `python -m tests.sim --mutations` says which seeds notice each bug"
