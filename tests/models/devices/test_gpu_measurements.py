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


_RIGHT = "import typer; from perf.gpu.right import right; typer.run(right)"


def test_results_are_compared_with_the_reference_in_one_go(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _RIGHT, "--device", "cpu", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    findings = json.loads((tmp_path / "gpu-right.json").read_text())["results"]["findings"]
    assert {finding["model"] for finding in findings} == {
        "bert-mean",
        "bge-m3",
        "clip",
        "served",
        "served, full device",
    }
    compared = [finding for finding in findings if finding["difference"] is not None]
    assert all(finding["difference"] <= finding["bound"] for finding in compared)
    ways = {finding["way"] for finding in compared if finding["model"] == "bge-m3"}
    assert ways == {f"{dtype}, {way}" for dtype in ("float32", "bfloat16") for way in ("padded", "in groups")}
    outputs = {finding["subject"].split()[0] for finding in compared if finding["model"] == "bge-m3"}
    assert outputs == {"dense", "sparse", "multi_vector", "token_weights"}
    assert done.stdout.splitlines()[-1] == f"{len(findings)} checks, 0 wrong"
