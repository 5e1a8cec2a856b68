"""A few hundred requests; `make fuzz` asks thousands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.run import fuzz


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """There is no event loop, and processes are waited for."""


def test_every_answer_is_as_described_and_nothing_is_accepted_that_is_not(tmp_path: Path) -> None:
    cases, _ = fuzz(tmp_path, examples=10, seed=1, phases=("examples", "fuzzing"))
    assert cases > 200
