"""CoreLimiter that this process may use."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from staged_pool.runtime.machine.cpu_quota import quota_cores

_QUOTA: Final = quota_cores()
"""Read once, at import: whoever asks for it may be on an event loop, where no file is read."""


def usable_cores() -> int:
    """CoreLimiter that this process may run on, at least 1: on Linux, the fewer of its affinity and of its quota."""
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else os.cpu_count() or 1
    return usable if _QUOTA is None else min(usable, _QUOTA)
