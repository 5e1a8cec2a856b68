"""The command that checks and times a device, on the device that is always there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perf.tools.servers import ROOT

pytestmark = pytest.mark.long


def test_models_are_measured_bare_in_the_engine_and_over_http(tmp_path: Path) -> None:
    names = "BERT, 1 layer;CLIP, 1 layer"
    command = [sys.executable, "-m", "perf.gpu", "speed", "--device", "cpu", "--quick", "--seconds", "0.05",
               "--only", names, "--results", str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    results = json.loads((tmp_path / "gpu-speed.json").read_text())["results"]
    assert results["failures"] == []
    cells = {(cell["model"], cell["load"]): cell for cell in results["cells"]}
    assert {"bare x64", "engine x64, 64", "HTTP x64, 64", "HTTP documents, 4"} <= {
        load for model, load in cells if model == "BERT, 1 layer"
    }
    assert {"bare 16 images", "engine image, 16", "HTTP image, 16"} <= {
        load for model, load in cells if model == "CLIP, 1 layer"
    }
    assert all(cell["tokens_per_s"] > 0 for cell in cells.values())


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
