from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.tiny import build


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real, tiny model."""
    return build("bert-mean", tmp_path_factory.mktemp("models") / "bert-mean")
