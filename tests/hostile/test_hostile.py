"""Every attack in its short form: nobody else gets an error or waits for seconds.

`python -m tests.hostile` runs them for longer, and holds the 99th percentile to three times that of a calm server.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.hostile.attack import Attack, all_attacks
from tests.hostile.running import Outcome, outcomes

SECONDS = 1.5
SLACK_S = 1.0
"""Other tests run on the same cores. What these attacks brought about took seconds, up to 75."""

ATTACKS = list(all_attacks())


@pytest.fixture(scope="module")
def attacked() -> Iterator[Iterator[Outcome]]:
    with closing(outcomes(ATTACKS, SECONDS)) as ran:  # the server of the last one ends with it
        yield ran


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_nobody_else_notices(attacked: Iterator[Outcome], attack: Attack) -> None:
    outcome = next(attacked)
    while outcome.attack != attack:  # some were deselected
        outcome = next(attacked)
    assert outcome.faults(SLACK_S) == []
