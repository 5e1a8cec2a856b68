"""Environments of other servers: one that cannot be built is reported with pip's own reason."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from perf.peers.catalogue import BARE, PEERS
from perf.peers.environments import BuildFailed, build
from perf.peers.run import build_all
from perf.tools.servers import ROOT


@pytest.fixture
def pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for pins, and a pip that finds no package anywhere."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    folder = tmp_path / "pins"
    folder.mkdir()
    return folder


@pytest.mark.long
def test_an_environment_is_built_once_and_anew_when_its_pins_change(pins: Path, tmp_path: Path) -> None:
    (pins / "empty.txt").write_text("# nothing\n")
    environments = tmp_path / "environments"
    python = build("empty", environments=environments, pins=pins)
    kept = python.parent / "kept"
    kept.touch()
    assert build("empty", environments=environments, pins=pins) == python
    assert kept.exists()
    (pins / "empty.txt").write_text("# nothing, but otherwise\n")
    build("empty", environments=environments, pins=pins)
    assert python.exists()
    assert not kept.exists()


def test_a_server_that_cannot_be_built_is_reported_with_the_reason_and_the_others_go_on(
    pins: Path, tmp_path: Path
) -> None:
    (pins / "broken.txt").write_text("no-such-package==1.0\n")
    broken = replace(PEERS[1], name="broken", environment="broken")
    make = partial(build, environments=tmp_path / "environments", pins=pins)
    failed, versions = build_all([broken, BARE], make)
    assert list(versions) == ["bare"]
    assert "No matching distribution found for no-such-package==1.0" in failed["broken"]


@pytest.mark.long
def test_a_build_that_failed_is_not_taken_for_one_that_is_done(pins: Path, tmp_path: Path) -> None:
    (pins / "broken.txt").write_text("no-such-package==1.0\n")
    for _ in range(2):
        with pytest.raises(BuildFailed, match="no-such-package"):
            build("broken", environments=tmp_path / "environments", pins=pins)


def test_ours_is_installed_without_what_tests_need(tmp_path: Path) -> None:
    made = subprocess.run(
        ["make", "--dry-run", "-C", str(ROOT), "install", f"VENV={tmp_path}"],
        capture_output=True,
        text=True,
        check=True,
    )
    installed = [line.split()[-1] for line in made.stdout.splitlines() if "editable" in line]
    assert installed == ["."]
