from __future__ import annotations

import pytest


@pytest.fixture
def nothing_blocks_the_event_loop() -> None:
    """Models are loaded, and modules imported, while the servers of these tests start."""
