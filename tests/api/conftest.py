from __future__ import annotations

from pathlib import Path

import pytest
from blockbuster import BlockBuster

from tests.models.tiny import build


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real, tiny model."""
    return build("bert-mean", tmp_path_factory.mktemp("models") / "bert-mean")


@pytest.fixture
def servers_may_import(nothing_blocks_the_event_loop: BlockBuster) -> None:
    """Allow imports of Hypercorn and of a model, and clients that read files."""
    nothing_blocks_the_event_loop.deactivate()
