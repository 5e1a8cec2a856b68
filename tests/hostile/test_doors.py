"""Large answers by every door of a server with little memory; `python -m tests.hostile.doors` prints figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.doors import DOORS, faults, look


@pytest.mark.long
@pytest.mark.parametrize("door", DOORS)
def test_no_door_takes_more_memory_than_there_is(tmp_path: Path, door: str) -> None:
    assert faults(look(door, tmp_path)) == []
