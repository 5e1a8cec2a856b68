"""The memory of a process."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import psutil
import pytest

from perf.cost.memory import HELD, held_mb

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no other system tells")


def test_memory_is_told_apart_by_what_it_holds(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"w" * 8_000_000)
    process = psutil.Process()
    before = held_mb(process)
    assert tuple(before) == HELD
    assert all(before[kind] > 1 for kind in ("anonymous", "libraries"))
    assert sum(before.values()) == pytest.approx(process.memory_info().rss / 1e6, rel=0.02)
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        allocated = mapped[:]  # which reads all of it, and takes as much again
        held = held_mb(process)
        assert held["weights"] - before["weights"] > 7.9
        assert len(allocated) == len(mapped)
    assert held_mb(process)["weights"] == before["weights"]
