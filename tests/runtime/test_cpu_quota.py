"""Quotas of control groups, as the cores that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from staged_pool.runtime.machine import cores
from staged_pool.runtime.machine.cores import usable_cores
from staged_pool.runtime.machine.cpu_quota import quota_cores

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "33 24 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct"


def system(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """A folder with the files of a system, each given by its path."""
    for path, text in {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return root


def v1(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": str(quota), f"{folder}/cpu.cfs_period_us": str(period)}


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "cores"),
    [
        pytest.param("0::/", V2, {"sys/fs/cgroup/cpu.max": "200000 100000"}, 2, id="docker, v2"),
        pytest.param("0::/", V2, {"sys/fs/cgroup/cpu.max": "150000 100000"}, 2, id="a fraction, v2"),
        pytest.param("0::/", V2, {"sys/fs/cgroup/cpu.max": "10000 100000"}, 1, id="a tenth of a core"),
        pytest.param("0::/", V2, {"sys/fs/cgroup/cpu.max": "max 100000"}, None, id="no quota, v2"),
        pytest.param("0::/", V2, {}, None, id="the topmost group has no file"),
        pytest.param(
            "0::/a.slice/b/c",
            V2,
            {
                "sys/fs/cgroup/a.slice/cpu.max": "300000 100000",
                "sys/fs/cgroup/a.slice/b/cpu.max": "max 100000",
                "sys/fs/cgroup/a.slice/b/c/cpu.max": "800000 100000",
            },
            3,
            id="the group above has less",
        ),
        pytest.param(
            "0::/kubepods/pod/one",
            V2.replace(" / /sys", " /kubepods/pod/one /sys"),
            {"sys/fs/cgroup/cpu.max": "400000 100000"},
            4,
            id="the mount shows the group itself",
        ),
        pytest.param("0::/../other", V2, {"sys/fs/cgroup/cpu.max": "500000 100000"}, 5, id="outside of what is shown"),
        pytest.param(
            "11:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc",
            V1.replace(" / /sys", " /docker/abc /sys"),
            v1("sys/fs/cgroup/cpu,cpuacct", 200_000),
            2,
            id="docker, v1",
        ),
        pytest.param(
            "4:cpuacct,cpu:/a/b",
            V1,
            v1("sys/fs/cgroup/cpu,cpuacct", -1)
            | v1("sys/fs/cgroup/cpu,cpuacct/a", 25_000, 10_000)
            | v1("sys/fs/cgroup/cpu,cpuacct/a/b", -1),
            3,
            id="nested, v1",
        ),
        pytest.param("4:cpuset:/a", V1, v1("sys/fs/cgroup/cpu,cpuacct/a", 200_000), None, id="another controller"),
        pytest.param(
            "4:cpu:/\n0::/user",
            f"{V1}\n{V2.replace('/sys/fs/cgroup', '/sys/fs/cgroup/unified')}",
            v1("sys/fs/cgroup/cpu,cpuacct", 700_000) | {"sys/fs/cgroup/unified/user/cpu.max": "600000 100000"},
            6,
            id="both versions",
        ),
        pytest.param(
            "0::/", V2.replace("cgroup rw", r"a\040b rw"), {"sys/fs/a b/cpu.max": "100000 50000"}, 2, id="spaces"
        ),
        pytest.param("0::/a:b", V2, {"sys/fs/cgroup/a:b/cpu.max": "200000 100000"}, 2, id="a colon"),
        pytest.param("nonsense", V2, {"sys/fs/cgroup/cpu.max": "200000 100000"}, None, id="nonsense"),
        pytest.param("0::/", "nonsense", {}, None, id="nonsense of mounts"),
        pytest.param("0::/", V2, {"sys/fs/cgroup/cpu.max": "much of it"}, None, id="nonsense in the file"),
        pytest.param("0::/", V2, {"sys/fs/cgroup/cpu.max": "200000 0"}, None, id="no period"),
    ],
)
def test_the_least_quota_counts(
    groups: str, mounts: str, files: dict[str, str], cores: int | None, tmp_path: Path
) -> None:
    assert quota_cores(system(tmp_path, groups, mounts, files)) == cores


def test_a_system_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert quota_cores(tmp_path) is None


@pytest.mark.parametrize(("quota", "usable"), [(2, 2), (None, 64), (100, 64)])
def test_the_fewer_of_quota_and_affinity_can_be_used(
    quota: int | None, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    monkeypatch.setattr(cores, "_QUOTA", quota)
    assert usable_cores() == usable
