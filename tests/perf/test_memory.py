"""The memory of a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from perf.cost.memory import HELD
from perf.tools.servers import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no other system tells")

_PROGRAM: Final = """
import json, mmap, sys
import psutil
from perf.cost.memory import held_mb

process = psutil.Process()
before, rss = held_mb(process), process.memory_info().rss / 1e6
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
    allocated = mapped[:]  # which reads all of it, and takes as much again
    during = held_mb(process)
print(json.dumps([before, rss, during, held_mb(process)]))
"""
"""A process of its own: another test's model may leave this one meanwhile."""


def test_memory_is_told_apart_by_what_it_holds(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"w" * 8_000_000)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(weights)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    before, rss, during, after = json.loads(done.stdout)
    assert tuple(before) == HELD
    assert all(before[kind] > 1 for kind in ("anonymous", "libraries"))
    assert sum(before.values()) == pytest.approx(rss, rel=0.05)  # the kernel counts pages of each core in steps
    assert during["weights"] - before["weights"] > 7.9
    assert during["anonymous"] - before["anonymous"] > 7.9
    assert after["weights"] == before["weights"]
