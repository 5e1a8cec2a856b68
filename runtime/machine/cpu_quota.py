"""CPU quota of Linux control groups, as a number of cores.

Containers are limited by it: `docker --cpus=2` sets a quota, and leaves every core of the machine usable. See "CPU
Interface Files" of https://docs.kernel.org/admin-guide/cgroup-v2.html.
"""

from __future__ import annotations

from contextlib import suppress
from math import ceil
from pathlib import Path

from staged_pool.runtime.machine.control_groups import GroupFolder, group_folders


def quota_cores(root: Path = Path("/")) -> int | None:
    """Return the smallest quota of the process's groups and their ancestors, in cores, rounded up.

    Args:
        root: Root folder of the system's files.

    Returns:
        At least 1. None: there is no quota, or no control groups.
    """
    quotas: list[float] = []
    with suppress(OSError, ValueError):  # another system, a sandbox without /proc, or an unknown format
        for folder in group_folders("cpu", root):
            with suppress(OSError, ValueError):  # the root group has no such file
                quotas += _quota(folder)
    return max(1, ceil(min(quotas))) if quotas else None


def _quota(folder: GroupFolder) -> list[float]:
    """Return the quota of one group, in cores. Empty: the group has none."""
    if folder.v2:
        quota, period = (folder.path / "cpu.max").read_text().split()
    else:
        quota, period = ((folder.path / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return [int(quota) / int(period)] if quota != "max" and int(quota) > 0 and int(period) > 0 else []
