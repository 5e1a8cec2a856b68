"""Unit of systemd: its form, its exposure, and its settings. The drop-ins of docs/containers.md are checked with it."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.files import DEPLOY, SECONDS_AFTER_DRAIN, seconds, settings_of, variables_of_settings
from tests.packaging.floors import ROOT

UNIT: Final = DEPLOY / "staged-pool.service"
HIGHEST_EXPOSURE: Final = 2.0
"""`systemd-analyze security` calls less than 2 OK, and 10 the most exposed."""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed: apt-get install systemd"
)


def verified(folder: Path, *dropins: str, unit: str = "") -> tuple[int, str]:
    """Verify the unit; return the exit status and the messages. The program is one that this machine has."""
    text = unit or UNIT.read_text()
    path = folder / UNIT.name
    path.write_text(text.replace("/opt/staged-pool/bin/staged-pool", sys.executable))
    for count, dropin in enumerate(dropins):
        place = folder / f"{UNIT.name}.d" / f"{count}.conf"
        place.parent.mkdir(exist_ok=True)
        place.write_text(dropin)
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def dropins() -> list[str]:
    """Return the drop-ins of the documents."""
    return re.findall(r"^```ini\n(.*?)^```", (ROOT / "docs/containers.md").read_text(), re.DOTALL | re.MULTILINE)


def unit_of(text: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser


def environment_of(text: str) -> dict[str, str]:
    """Return the variables that a unit or a drop-in sets."""
    lines = re.findall(r"^Environment=(.*)$", text, re.MULTILINE)
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line))


@needs_systemd
def test_systemd_accepts_it(tmp_path: Path) -> None:
    assert verified(tmp_path) == (0, "")


@needs_systemd
def test_systemd_accepts_the_dropins_of_the_documents(tmp_path: Path) -> None:
    assert len(dropins()) == 2
    assert verified(tmp_path, *dropins()) == (0, "")


@needs_systemd
def test_an_unknown_key_is_told(tmp_path: Path) -> None:
    """It is a warning with status 0: hence the tests look at the messages."""
    status, told = verified(tmp_path, unit=UNIT.read_text().replace("ProtectClock=", "ProtectClocks="))
    assert status == 0
    assert "'ProtectClocks'" in told


@needs_systemd
def test_it_is_little_exposed() -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Overall exposure level for staged-pool.service: ([\d.]+)", done.stdout)
    assert found
    assert float(found[1]) < HIGHEST_EXPOSURE


def test_its_settings_are_those_of_the_server() -> None:
    service = unit_of(UNIT.read_text())["Service"]
    variables = environment_of(UNIT.read_text())
    ours = {name: value for name, value in variables.items() if name.startswith("STAGED_POOL_")}
    settings = settings_of(shlex.split(service["ExecStart"]), ours)
    assert settings.given == {"drain-timeout"}
    assert seconds(service["TimeoutStopSec"]) >= settings.drain_s + SECONDS_AFTER_DRAIN
    assert {"HF_HOME", "XDG_CACHE_HOME"} <= variables.keys()
    for dropin in dropins():
        named = {name for name in environment_of(dropin) if name.startswith("STAGED_POOL_")}
        assert named <= variables_of_settings()


def test_it_keeps_on_what_the_server_needs() -> None:
    """Kernels are compiled at run time, and the free memory is read from /proc."""
    service = unit_of(UNIT.read_text())["Service"]
    assert "MemoryDenyWriteExecute" not in service
    assert "ProcSubset" not in service
    assert service["KillMode"] == "mixed"
    assert service["RestartPreventExitStatus"] == "2"
