"""Vectors of images are the same bits with, without and beside a broken torchvision."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from staged_pool.runtime.models.images.torchvision import _hidden
from tests.models import tiny

ROOT: Final = Path(__file__).parents[3]
KINDS: Final = ("clip", "siglip2-fixed", "vit-st-mean", "qwen2-vl")

BROKEN: Final = 'raise RuntimeError("operator torchvision::nms does not exist")\n'
"""As one that was built for another torch ends."""
WORKING: Final = '''
"""Has any name, each a class of its own: what would use them for pixels would fail or differ."""
import importlib.machinery, sys, types

class Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

class Module(types.ModuleType):
    __path__ = []
    __getattr__ = Anything.__getattr__

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
__version__ = "0.99.0"
sys.modules[__name__].__class__ = Module
'''

PROGRAM: Final = """
import json, sys
import anyio
import numpy as np
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.open import open_engine
from staged_pool.runtime.requests import Image
from tests.models.bits import digest
from tests.models.encoded_images import encode

IMAGES = [encode(97, 61), encode(30, 200, "PNG", seed=1)]

async def main():
    for folder in sys.argv[1:]:
        for path in ("fast", "exact"):
            async with open_engine(EngineConfig(model=folder, image_path=path, tune="off")) as engine:
                # One by one: images that meet in a batch may differ in their last bits.
                rows = [(await engine.embed(Image(each))).embeddings for each in IMAGES]
                found.append(digest(np.concatenate(rows)))

found = []
anyio.run(main)
from transformers.utils import is_torchvision_available
print(json.dumps([found, is_torchvision_available()]))
"""


def _start(folders: list[str], packages: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *folders],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{packages}{os.pathsep}{ROOT}"},
    )


@pytest.fixture
def packages(tmp_path: Path) -> dict[str, Path]:
    """Folders of packages by what torchvision is there."""
    folders = {"absent": tmp_path / "absent"}
    for name, source in (("working", WORKING), ("broken", BROKEN)):
        folders[name] = tmp_path / name
        (folders[name] / "torchvision").mkdir(parents=True)
        (folders[name] / "torchvision" / "__init__.py").write_text(source, encoding="utf-8")
    return folders


def test_torchvision_changes_no_bit(packages: dict[str, Path], tmp_path: Path) -> None:
    models = [str(tiny.build(kind, tmp_path / "models" / kind)) for kind in KINDS]
    found = {}
    with ExitStack() as ending:
        processes = {name: ending.enter_context(_start(models, folder)) for name, folder in packages.items()}
        for process in processes.values():
            ending.callback(process.kill)
        for name, process in processes.items():
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0, err
            found[name], available = json.loads(out.splitlines()[-1])
            if name != "absent":  # a developer may have one
                assert available == (name == "working")
    assert len(found["absent"]) == 2 * len(KINDS)
    assert found["working"] == found["absent"]
    assert found["broken"] == found["absent"]


class _Added:
    """A finder of modules that finds nothing."""

    def find_spec(self, *_: object) -> None:
        return None


def test_a_package_is_hidden_for_as_long_as_the_block_and_others_are_found() -> None:
    finders, version, added = sys.meta_path[:], metadata.version("numpy"), _Added()
    try:
        with _hidden("wave"):
            assert find_spec("wave") is None
            assert find_spec("colorsys") is not None
            assert metadata.version("numpy") == version
            sys.meta_path.insert(0, added)
        assert sys.meta_path == [added, *finders]
        assert find_spec("wave") is not None
    finally:
        sys.meta_path[:] = finders
