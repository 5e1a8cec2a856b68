from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.api.conftest import tiny_folder  # noqa: F401  # a fixture
from tests.chaos.harness import UnderFire


@pytest.fixture
def nothing_blocks_the_event_loop() -> None:
    """Allow imports at start-up, and clients that are plain sockets."""


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected client that goes on sending is cut off soon."""
    monkeypatch.setattr("staged_pool.api.http.general_path.LINGER_S", 0.05)


@pytest.fixture
async def fire(anyio_backend: object) -> AsyncIterator[UnderFire]:
    """A server that a test may do anything to; afterwards it must be as it was."""
    async with UnderFire.opened(body_timeout_s=5, head_timeout_s=2) as fire:
        yield fire
        await fire.assert_unharmed()
