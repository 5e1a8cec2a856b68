"""The spinning of torch's threads, as OpenMP tells it, and their end."""

from __future__ import annotations

import importlib.util
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from staged_pool.runtime.threads import openmp
from staged_pool.runtime.threads.openmp import VARIABLES, release_omp_team, spin_briefly

TORCH_HAS_LIBGOMP = any(
    any((Path(folder) / "lib").glob("libgomp*"))
    for folder in getattr(importlib.util.find_spec("torch"), "submodule_search_locations", ())
)

SHOW = """
import os
from staged_pool.runtime.threads.openmp import spin_briefly

spin_briefly()
os.environ["OMP_DISPLAY_ENV"] = "VERBOSE"
import torch
"""


DISMISS = """
import os, sys, time
from staged_pool.runtime.threads.openmp import release_omp_team

release_omp_team()
assert "torch" not in sys.modules
import torch

def threads(wanted):
    deadline = time.monotonic() + 20  # the system may show for a moment what has ended
    while (found := len(os.listdir("/proc/self/task"))) != wanted and time.monotonic() < deadline:
        time.sleep(0.001)
    return found

torch.set_num_threads(3)
values = torch.ones(4_000_000)
release_omp_team()
alone = len(os.listdir("/proc/self/task"))
for _ in range(2):
    values + values
    assert len(os.listdir("/proc/self/task")) == alone + 2
    release_omp_team()
    assert threads(alone) == alone
release_omp_team()
"""


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    openmp._libgomps.cache_clear()
    yield
    openmp._libgomps.cache_clear()


libgomp_only = pytest.mark.skipif(not TORCH_HAS_LIBGOMP, reason="this build of torch has another OpenMP")


@libgomp_only
def test_libgomp_is_told_how_long() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    shown = subprocess.run(
        [sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stderr
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in shown
    assert "GOMP_SPINCOUNT = '8000'" in shown


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


@libgomp_only
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not show threads as files")
def test_an_openmp_team_ends_and_is_started_again() -> None:
    subprocess.run([sys.executable, "-c", DISMISS], timeout=60, check=True)


def test_without_libgomp_nobody_is_dismissed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "find_spec", lambda name: None)
    release_omp_team()
    assert openmp._pause() is None


def test_a_process_that_may_open_no_files_goes_on() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.listdir(".")
        release_omp_team()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    release_omp_team()
