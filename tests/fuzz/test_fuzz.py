"""A short fuzzing run of a few hundred requests; `make fuzz` sends thousands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.run import fuzz


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """Do not watch for blocking calls: there is no event loop."""


def test_every_answer_is_as_described_and_nothing_is_accepted_that_is_not(tmp_path: Path) -> None:
    cases, _ = fuzz(tmp_path, examples=6, seed=1, phases=("examples", "fuzzing"))
    assert cases > 150
