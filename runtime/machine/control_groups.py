"""Linux control groups: the folders of the groups that this process is in, and of those above them.

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
    """Its files are those of version 2."""


class _Mount(NamedTuple):
    """A place where control groups are seen as folders."""

    group: PurePosixPath
    """The group that the place itself shows."""
    place: PurePosixPath
    v2: bool


def group_folders(controller: Controller, root: Path = Path("/")) -> Iterator[GroupFolder]:
    """Yield the folders of this process's groups and of those above them, innermost first.

    Args:
        controller: Name of the controller that must be there in version 1.
        root: Folder that holds the system's files.

    Raises:
        OSError: There are no such files: another system, or a sandbox without /proc.
        ValueError: They are written in another way than is known here.
    """
    mounts = list(_mounts((root / "proc/self/mountinfo").read_text(), controller))
    for v2, group in _groups((root / "proc/self/cgroup").read_text(), controller):
        for mount in mounts:
            if mount.v2 == v2:
                below = _below(group, mount.group)
                for folder in (below, *below.parents):
                    yield GroupFolder(root / mount.place.relative_to("/") / folder, v2)


def _groups(listed: str, controller: Controller) -> Iterator[tuple[bool, PurePosixPath]]:
    """Yield the groups of /proc/self/cgroup with this controller, each with True for version 2."""
    for line in listed.splitlines():
        number, controllers, path = line.split(":", 2)
        if (number, controllers) == ("0", "") or controller in controllers.split(","):
            yield not controllers, PurePosixPath(path)


def _mounts(mountinfo: str, controller: Controller) -> Iterator[_Mount]:
    """Yield the places of /proc/self/mountinfo that show groups with this controller."""
    for line in mountinfo.splitlines():
        fields, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            group, place = (_ESCAPED.sub(lambda one: chr(int(one[1], 8)), one) for one in fields.split(" ")[3:5])
            yield _Mount(PurePosixPath(group), PurePosixPath(place), v2=kind == "cgroup2")


def _below(group: PurePosixPath, shown: PurePosixPath) -> PurePosixPath:
    """Return the path of a group below the one that a mount shows.

    A container may see its own group there, and be told the path that this has outside. Then it is the mount itself.
    """
    found = group.relative_to(shown) if group.is_relative_to(shown) else PurePosixPath()
    return PurePosixPath() if ".." in found.parts else found
