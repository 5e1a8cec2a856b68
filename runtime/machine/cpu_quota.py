"""CPU time that Linux control groups allow this process, as a number of cores.

Containers are limited in this way: `docker --cpus=2` sets a quota, and leaves every core of the machine usable. See
"CPU Interface Files" of https://docs.kernel.org/admin-guide/cgroup-v2.html.
"""

from __future__ import annotations

from contextlib import suppress
from math import ceil
from pathlib import Path

from staged_pool.runtime.machine.control_groups import GroupFolder, group_folders


def quota_cores(root: Path = Path("/")) -> int | None:
    """Return the least quota of the process's groups and of those above them, in cores, rounded up.

    Args:
        root: Folder that holds the system's files.

    Returns:
        At least 1. None: there is no quota, or no control groups.
    """
    quotas: list[float] = []
    with suppress(OSError, ValueError):  # another system, a sandbox without /proc, or words that are not known here
        for folder in group_folders("cpu", root):
            with suppress(OSError, ValueError):  # the topmost group has no such file
                quotas += _quota(folder)
    return max(1, ceil(min(quotas))) if quotas else None


def _quota(folder: GroupFolder) -> list[float]:
    """Return the quota of one group, in cores; nothing where it has none."""
    if folder.v2:
        quota, period = (folder.path / "cpu.max").read_text().split()
    else:
        quota, period = ((folder.path / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return [int(quota) / int(period)] if quota != "max" and int(quota) > 0 and int(period) > 0 else []
