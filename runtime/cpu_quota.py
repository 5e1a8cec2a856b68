"""CPU time that Linux control groups allow this process, as a number of cores.

Containers are limited in this way: `docker --cpus=2` sets a quota, and leaves every core of the machine usable. See
`cgroups(7)`, and "CPU Interface Files" of https://docs.kernel.org/admin-guide/cgroup-v2.html.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from math import ceil
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


class _Mount(NamedTuple):
    """A place where control groups are seen as folders."""

    group: PurePosixPath
    """The group that the place itself shows."""
    place: PurePosixPath
    v2: bool


def quota_cores(root: Path = Path("/")) -> int | None:
    """Return the least quota of the process's groups and of those above them, in cores, rounded up.

    Args:
        root: Where the system's files are.

    Returns:
        At least 1. None: there is no quota, or no control groups.
    """
    quotas: list[float] = []
    with suppress(OSError, ValueError):  # another system, a sandbox without /proc, or words that are not known here
        mounts = list(_mounts((root / "proc/self/mountinfo").read_text()))
        for v2, group in _groups((root / "proc/self/cgroup").read_text()):
            for mount in mounts:
                if mount.v2 == v2:
                    quotas += _quotas(root / mount.place.relative_to("/"), _below(group, mount.group), v2=v2)
    return max(1, ceil(min(quotas))) if quotas else None


def _groups(listed: str) -> Iterator[tuple[bool, PurePosixPath]]:
    """The groups of /proc/self/cgroup that can have a quota, each with True for one of version 2."""
    for line in listed.splitlines():
        number, controllers, path = line.split(":", 2)
        if (number, controllers) == ("0", "") or "cpu" in controllers.split(","):
            yield not controllers, PurePosixPath(path)


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    """The places of /proc/self/mountinfo that show groups which can have a quota."""
    for line in mountinfo.splitlines():
        fields, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(",")):
            group, place = (_ESCAPED.sub(lambda one: chr(int(one[1], 8)), one) for one in fields.split(" ")[3:5])
            yield _Mount(PurePosixPath(group), PurePosixPath(place), v2=kind == "cgroup2")


def _below(group: PurePosixPath, shown: PurePosixPath) -> PurePosixPath:
    """The path of a group below the one that a mount shows.

    A container may see its own group there, and be told the path that this has outside. Then it is the mount itself.
    """
    found = group.relative_to(shown) if group.is_relative_to(shown) else PurePosixPath()
    return PurePosixPath() if ".." in found.parts else found


def _quotas(mount: Path, group: PurePosixPath, *, v2: bool) -> Iterator[float]:
    """The quotas of a group and of those above it, in cores."""
    for folder in (group, *group.parents):
        with suppress(OSError, ValueError):  # the topmost group has no such file
            if v2:
                quota, period = (mount / folder / "cpu.max").read_text().split()
            else:
                quota, period = ((mount / folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if quota != "max" and int(quota) > 0 and int(period) > 0:
                yield int(quota) / int(period)
