"""Memory limit of this process, and its real use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from staged_pool.runtime.machine.control_groups import GroupFolder, group_folders

UNKNOWN_LIMIT_BYTES: Final = 4 * 2**30
"""Limit on systems that report nothing about their memory."""

_NO_LIMIT_BYTES: Final = 2**60
"""Limits from here on mean no limit in version 1: the file has the kernel's largest number of pages, in bytes."""

_PROCESS_LIMITS: Final = (("Max address space", 0), ("Max data size", 5))
"""Limits (`ulimit -v`, `ulimit -d`) in /proc/self/limits, each with the field of statm that it limits."""


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Memory limit of one control group of this process."""

    folder: GroupFolder
    limit_bytes: int

    def used_bytes(self) -> int:
        """Return the memory use of the whole group, without inactive files in the page cache.

        The kernel drops these before it kills a process. Kubernetes calls the rest the working set.

        Raises:
            OSError: The group is gone.
        """
        names = (
            ("memory.current", "inactive_file") if self.folder.v2 else ("memory.usage_in_bytes", "total_inactive_file")
        )
        usage = int((self.folder.path / names[0]).read_text())
        for line in (self.folder.path / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == names[1]:
                return max(0, usage - int(value))
        return usage


class Machine:
    """Reader of the system's files about memory.

    Args:
        root: Root folder of the system's files.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._statm = root / "proc/self/statm"
        self._process_limits = root / "proc/self/limits"

    @cached_property
    def groups(self) -> tuple[GroupMemory, ...]:
        """Control groups of this process with a memory limit."""
        return tuple(_limited_groups(self._root))

    def limit_bytes(self) -> int:
        """Return the memory limit of this process, in bytes.

        It is the smallest of the process's and its groups' limits, and of the memory that the machine has available.
        """
        limits = [group.limit_bytes for group in self.groups]
        if (room := self.mappable_bytes()) is not None:
            limits.append(self.resident_bytes() + room)
        available = self._available_bytes()
        if available is not None:
            limits.append(available + self.resident_bytes())
        return min(limits, default=UNKNOWN_LIMIT_BYTES)

    def mappable_bytes(self) -> int | None:
        """Return the bytes that `ulimit -v` and `ulimit -d` let this process still map. None: no limit.

        Mapped memory is larger than resident memory, mostly by libraries and the allocator's reserve. So use it for the
        memory left after models are loaded, and not for memory pressure.
        """
        rooms = []
        with suppress(OSError, ValueError, IndexError):
            pages = self._statm.read_text().split()
            for line in self._process_limits.read_text().splitlines():
                for name, field in _PROCESS_LIMITS:
                    if line.startswith(name) and (limit := line.removeprefix(name).split()[0]) != "unlimited":
                        rooms.append(max(0, int(limit) - int(pages[field]) * os.sysconf("SC_PAGE_SIZE")))
        return min(rooms, default=None)

    def resident_bytes(self) -> int:
        """Return the resident set of this process, in bytes. 0: the system does not report it."""
        with suppress(OSError, ValueError, IndexError):
            return int(self._statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0

    def fullness(self, limit_bytes: int) -> float:
        """Return the used fraction of the limit, or of a control group's limit if larger.

        Args:
            limit_bytes: Memory limit of this process.
        """
        parts = [self.resident_bytes() / limit_bytes]
        for group in self.groups:
            with suppress(OSError, ValueError):  # the group is gone
                parts.append(group.used_bytes() / group.limit_bytes)
        return max(parts)

    def _available_bytes(self) -> int | None:
        """Return the available memory of the machine without swapping, in bytes. None: unknown."""
        with suppress(OSError, ValueError):
            for line in (self._root / "proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        if sys.platform == "darwin":
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return None


def _limited_groups(root: Path) -> Iterator[GroupMemory]:
    with suppress(OSError, ValueError):  # another system, or a sandbox without /proc
        for folder in group_folders("memory", root):
            with suppress(OSError, ValueError):  # "max", or the root group, which has no such file
                limit = int((folder.path / ("memory.max" if folder.v2 else "memory.limit_in_bytes")).read_text())
                if 0 < limit < _NO_LIMIT_BYTES:
                    yield GroupMemory(folder, limit)
