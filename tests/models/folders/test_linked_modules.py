"""A module of a folder may be a link; a name that leads out of the folder may not."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.specs.inner_path import leads_out
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import ConfigError
from tests.models.conftest import TinyFolder
from tests.models.requests import embed


@pytest.fixture
def folder(tiny_folder: TinyFolder, tmp_path: Path) -> Path:
    """A copy of a model with two Dense modules."""
    return shutil.copytree(tiny_folder("bert-max-dense"), tmp_path / "model")


def vectors(folder: Path) -> NDArray[np.float32]:
    with closing(load_model(EngineConfig(model=str(folder), torch_threads=1, dtype="float32"))) as model:
        return embed(model, ["one", "two words"], Output.DENSE).embeddings


def test_modules_may_be_links_to_elsewhere(folder: Path, tmp_path: Path) -> None:
    wanted = vectors(folder)
    for name in ("1_Pooling", "2_Dense", "3_Dense"):
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name, target_is_directory=True)
    assert np.array_equal(vectors(folder), wanted)


def test_the_folder_of_the_model_may_be_made_of_links(folder: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    assert np.array_equal(vectors(linked), vectors(folder))


def test_a_name_that_leads_out_is_rejected(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "1_Pooling", tmp_path / "1_Pooling")
    modules = json.loads((folder / "modules.json").read_text())
    for name in ("../1_Pooling", "1_Pooling/../../1_Pooling", str(tmp_path / "1_Pooling")):
        modules[1]["path"] = name
        (folder / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(ConfigError, match=r"modules.json\[1\]: path=.* leads out of the model folder"):
            load_model(EngineConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("name", "out"),
    [
        ("", False), (".", False), ("a", False), ("a/b", False), ("a/../b", False), ("..a", False), ("a/..", False),
        ("..", True), ("../a", True), ("a/../..", True), ("/a", True), ("/", True),
    ],
)  # fmt: skip
def test_only_the_name_counts(name: str, out: bool) -> None:
    assert leads_out(name) is out
