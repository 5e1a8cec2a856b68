"""Every attack in its short form: nobody else gets an error or waits for seconds.

`python -m tests.hostile` runs them for longer, and holds the 99th percentile to three times that of a calm server.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.hostile.attack import Attack
from tests.hostile.registered import ATTACKS
from tests.hostile.running import Outcome, outcomes

SECONDS = 1.0
SLACK_S = 2.0
"""Slack in seconds, as other tests run on the same cores. Unfixed, these attacks delayed others by up to 75 s."""


@pytest.fixture(scope="module")
def attacked(request: pytest.FixtureRequest) -> Iterator[Iterator[Outcome]]:
    names = {each.name for each in request.session.items}
    selected = [each for each in ATTACKS if f"test_nobody_else_notices[{each.name}]" in names]
    with closing(outcomes(selected, SECONDS, calm_once=True)) as ran:  # the server of the last one ends with it
        yield ran


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_nobody_else_notices(attacked: Iterator[Outcome], attack: Attack) -> None:
    outcome = next(attacked)
    assert outcome.attack == attack
    assert outcome.faults(SLACK_S) == []
