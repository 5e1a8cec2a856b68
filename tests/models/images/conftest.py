from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.images.drawing import Folder, save_family


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Gives the folder of a family's image processor, made once a session."""
    root = tmp_path_factory.mktemp("families")

    def folder(name: str) -> Path:
        path = root / name
        return path if path.exists() else save_family(name, path)

    return folder
