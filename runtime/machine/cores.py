"""Number of cores that this process may use."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from staged_pool.runtime.machine.cpu_quota import quota_cores

_QUOTA: Final = quota_cores()
"""CPU quota in cores. It is read at import, because callers on the event loop must not read files."""


def usable_cores() -> int:
    """Return the number of usable cores: on Linux, the minimum of affinity and quota; at least 1."""
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else os.cpu_count() or 1
    return usable if _QUOTA is None else min(usable, _QUOTA)
