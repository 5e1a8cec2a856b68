"""Linux control groups: folders of this process's groups and their ancestors.

Containers are limited by them. See `cgroups(7)`, https://docs.kernel.org/admin-guide/cgroup-v2.html and
https://docs.kernel.org/admin-guide/cgroup-v1/.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, Literal, NamedTuple, TypeAlias

Controller: TypeAlias = Literal["cpu", "memory"]

_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


class GroupFolder(NamedTuple):
    """The folder of one group."""

    path: Path
    v2: bool
    """True: the files of version 2."""


class _Mount(NamedTuple):
    """A mount of a file system of control groups."""

    group: PurePosixPath
    """Group at the root of the mount."""
    place: PurePosixPath
    """Mount point."""
    v2: bool
    """True: version 2."""


def group_folders(controller: Controller, root: Path = Path("/")) -> Iterator[GroupFolder]:
    """Yield the folders of this process's groups and their ancestors, innermost first.

    Args:
        controller: Name of a controller, which version 1 needs.
        root: Root folder of the system's files.

    Raises:
        OSError: There are no control groups: another system, or a sandbox without /proc.
        ValueError: A file has an unknown format.
    """
    mounts = list(_mounts((root / "proc/self/mountinfo").read_text(), controller))
    for v2, group in _groups((root / "proc/self/cgroup").read_text(), controller):
        for mount in mounts:
            if mount.v2 == v2:
                below = _below(group, mount.group)
                for folder in (below, *below.parents):
                    yield GroupFolder(root / mount.place.relative_to("/") / folder, v2)


def _groups(listed: str, controller: Controller) -> Iterator[tuple[bool, PurePosixPath]]:
    """Yield the groups in /proc/self/cgroup with this controller. True: version 2."""
    for line in listed.splitlines():
        number, controllers, path = line.split(":", 2)
        if (number, controllers) == ("0", "") or controller in controllers.split(","):
            yield not controllers, PurePosixPath(path)


def _mounts(mountinfo: str, controller: Controller) -> Iterator[_Mount]:
    """Yield the mounts in /proc/self/mountinfo of groups with this controller."""
    for line in mountinfo.splitlines():
        fields, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            group, place = (
                _ESCAPED.sub(lambda match: chr(int(match[1], 8)), field) for field in fields.split(" ")[3:5]
            )
            yield _Mount(PurePosixPath(group), PurePosixPath(place), v2=kind == "cgroup2")


def _below(group: PurePosixPath, mounted: PurePosixPath) -> PurePosixPath:
    """Return the path of a group relative to its mount.

    In a container, the mount may be the process's own group, while /proc/self/cgroup has its path on the host. Then the
    path is the mount itself.
    """
    found = group.relative_to(mounted) if group.is_relative_to(mounted) else PurePosixPath()
    return PurePosixPath() if ".." in found.parts else found
