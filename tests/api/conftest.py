from __future__ import annotations

from pathlib import Path

import pytest
from blockbuster import BlockBuster

from tests.models.tiny import build
from tests.servers.certificates import Certificates


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real, tiny model."""
    return build("bert-mean", tmp_path_factory.mktemp("models") / "bert-mean")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of a server, and of a root that only the tests know."""
    return Certificates.made_in(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def servers_may_import(nothing_blocks_the_event_loop: BlockBuster) -> None:
    """Allow imports of Hypercorn and of a model, and clients that read files."""
    nothing_blocks_the_event_loop.deactivate()
