"""The memory of the machine, from the files of the system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from staged_pool.runtime.machine.memory import UNKNOWN_LIMIT_BYTES, Machine
from tests.runtime.test_cpu_quota import V2, system

V1 = "32 31 0:31 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
PAGE = os.sysconf("SC_PAGE_SIZE")
GIB = 2**30


def machine(root: Path, groups: str, mounts: str, **files: str) -> Machine:
    """A machine with 8 GiB to give, on which this process has 100 pages."""
    common = {"proc/self/statm": "500 100 50 1 0 90 0", "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {8 * 2**20} kB"}
    named = {path.replace("__", "/"): text for path, text in files.items()}
    return Machine(system(root, groups, mounts, common | named))


def test_without_a_group_it_has_what_is_available(tmp_path: Path) -> None:
    found = machine(tmp_path, "0::/", V2)
    assert found.limit_bytes() == 8 * GIB + 100 * PAGE
    assert found.resident_bytes() == 100 * PAGE
    assert found.fullness(400 * PAGE) == 0.25


@pytest.mark.parametrize(
    ("groups", "mounts", "folder", "names"),
    [
        pytest.param("0::/a", V2, "sys/fs/cgroup/a", ("memory.max", "memory.current", "inactive_file"), id="v2"),
        pytest.param(
            "4:memory:/a",
            V1,
            "sys/fs/cgroup/memory/a",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            id="v1",
        ),
    ],
)
def test_a_group_limits_it(tmp_path: Path, groups: str, mounts: str, folder: str, names: tuple[str, str, str]) -> None:
    limit, usage, files = names
    found = machine(tmp_path, groups, mounts)
    (tmp_path / folder).mkdir(parents=True)
    for name, text in ((limit, f"{2 * GIB}"), (usage, f"{GIB}"), ("memory.stat", f"anon 5\n{files} {GIB // 2}\n")):
        (tmp_path / folder / name).write_text(text)
    assert found.limit_bytes() == 2 * GIB
    assert found.fullness(8 * GIB) == 0.25, "the group has other processes, and files that the kernel may drop"


@pytest.mark.parametrize("text", ["max", f"{2**63 - 4096}"])
def test_a_limit_of_a_group_may_be_none(tmp_path: Path, text: str) -> None:
    found = machine(tmp_path, "0::/", V2, sys__fs__cgroup__memory_max="")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(text)
    assert found.limit_bytes() == 8 * GIB + 100 * PAGE


LIMITS = """Limit                     Soft Limit           Hard Limit           Units     
Max cpu time              unlimited            unlimited            seconds   
Max data size             {:<20} unlimited            bytes     
Max stack size            8388608              unlimited            bytes     
Max address space         {:<20} unlimited            bytes     
"""  # noqa: W291  # as the kernel writes it


@pytest.mark.parametrize(
    ("data", "space", "room"),
    [
        pytest.param("unlimited", "unlimited", None, id="none"),
        pytest.param("unlimited", f"{GIB}", GIB - 500 * PAGE, id="address space, of which it has mapped 500 pages"),
        pytest.param(f"{GIB}", "unlimited", GIB - 90 * PAGE, id="data, of which it has mapped 90 pages"),
        pytest.param(f"{GIB}", f"{GIB + 500 * PAGE}", GIB - 90 * PAGE, id="both: the one that leaves less"),
        pytest.param("4096", "unlimited", 0, id="lowered below what it has"),
    ],
)
def test_a_limit_of_the_process_leaves_what_is_not_mapped(
    tmp_path: Path, data: str, space: str, room: int | None
) -> None:
    found = machine(tmp_path, "0::/", V2, proc__self__limits=LIMITS.format(data, space))
    assert found.mappable_bytes() == room
    assert found.limit_bytes() == 100 * PAGE + (8 * GIB if room is None else room)
    assert found.fullness(400 * PAGE) == 0.25, "what is mapped may be free"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_limit_of_this_process_is_known() -> None:
    program = (
        "import resource; from staged_pool.runtime.machine.memory import Machine; "
        "resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33)); print(Machine().mappable_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert 2**31 < int(done.stdout) < 2**33


def test_a_system_that_tells_nothing_has_a_limit_all_the_same(tmp_path: Path) -> None:
    found = Machine(tmp_path)
    assert found.limit_bytes() == UNKNOWN_LIMIT_BYTES
    assert found.fullness(100) == 0


def test_a_group_that_is_gone_says_nothing(tmp_path: Path) -> None:
    found = machine(tmp_path, "0::/", V2)
    (tmp_path / "sys/fs/cgroup/").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{GIB}")
    assert found.limit_bytes() == GIB
    assert found.fullness(400 * PAGE) == 0.25


def test_this_machine_tells() -> None:
    here = Machine()
    assert here.limit_bytes() > here.resident_bytes() > 2**20
    assert 0 < here.fullness(here.limit_bytes()) < 1
