"""The command that checks and times a device, on the device that is always there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perf.tools.servers import ROOT

pytestmark = pytest.mark.long


def test_a_device_is_checked_and_timed_in_one_go(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perf.gpu", "--device", "cpu", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert all(check["difference"] <= check["limit"] for check in results["checks"])
    assert {check["model"] for check in results["checks"]} == {"bert-mean", "the one that is timed", "clip"}
    assert [cell["tokens"] for cell in results["forwards"]] == [64, 256]
    assert [cell["clients"] for cell in results["http"]] == [1, 8]
    assert all(cell["texts_per_s"] > 0 for cell in results["http"])
    assert (tmp_path / "gpu.md").read_text().startswith("| way, tokens |")
