"""How long torch's threads spin before they sleep, as OpenMP itself tells it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from staged_pool.runtime import openmp
from staged_pool.runtime.openmp import VARIABLES, spin_briefly

TORCH_HAS_LIBGOMP = any(
    any((Path(folder) / "lib").glob("libgomp*"))
    for folder in getattr(importlib.util.find_spec("torch"), "submodule_search_locations", ())
)

SHOW = """
import os
from staged_pool.runtime.openmp import spin_briefly

spin_briefly()
os.environ["OMP_DISPLAY_ENV"] = "VERBOSE"
import torch
"""


@pytest.mark.skipif(not TORCH_HAS_LIBGOMP, reason="this build of torch has another OpenMP")
def test_libgomp_is_told_how_long() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    shown = subprocess.run(
        [sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stderr
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in shown
    assert "GOMP_SPINCOUNT = '2000'" in shown


@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_user_has_set_stays(name: str) -> None:
    environment = {name: "anything", "PATH": ""}
    spin_briefly(environment)
    assert environment == {name: "anything", "PATH": ""}


@pytest.mark.parametrize("where", ["nowhere", "without libgomp"])
def test_threads_of_another_openmp_sleep_at_once(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "lib" / "libomp.dylib").touch()
    found = importlib.util.spec_from_file_location(
        "torch", tmp_path / "torch" / "__init__.py", submodule_search_locations=[str(tmp_path / "torch")]
    )
    monkeypatch.setattr(openmp, "find_spec", lambda name: None if where == "nowhere" else found)
    environment = dict[str, str]()
    spin_briefly(environment)
    assert environment == {"OMP_WAIT_POLICY": "PASSIVE"}
