"""Busy loops: they spin on every core while they are wanted, and none is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from perf.peers.neighbours import busy_loops, cpu_s
from perf.tools.servers import ROOT

WITHIN_S = 30.0

LEFT_ALONE = """
import os
from perf.peers.neighbours import busy_loops
with busy_loops() as loops:
    print(*(loop.pid for loop in loops), flush=True)
    os._exit(0)
"""


def test_a_loop_spins_on_each_core_at_the_same_priority_until_the_block_ends() -> None:
    with busy_loops() as loops:
        cores = [loop.cpu_affinity() for loop in loops]
        assert sorted(cores) == [[core] for core in sorted(os.sched_getaffinity(0))]
        assert {loop.nice() for loop in loops} == {psutil.Process().nice()}
        stop_at = time.monotonic() + WITHIN_S
        while any(cpu_s([loop]) < 0.1 for loop in loops):
            assert time.monotonic() < stop_at, "a loop does not spin"
    assert not any(loop.is_running() for loop in loops)


def test_loops_end_where_the_measurement_fails() -> None:
    with pytest.raises(ZeroDivisionError), busy_loops() as loops:
        _ = 1 / 0
    assert loops
    assert not any(loop.is_running() for loop in loops)


def test_none_runs_where_none_is_wanted() -> None:
    with busy_loops(wanted=False) as loops:
        assert not loops
        assert cpu_s(loops) == 0


def test_loops_end_with_a_process_that_could_not_end_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT_ALONE], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=WITHIN_S
    )
    left = [psutil.Process(int(pid)) for pid in done.stdout.split() if psutil.pid_exists(int(pid))]
    assert done.stdout.split()
    assert not psutil.wait_procs(left, timeout=WITHIN_S)[1]
