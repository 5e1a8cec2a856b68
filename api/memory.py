"""Memory that is freed stays with the process, for whoever asks next.

A forward allocates and frees megabytes at every layer. glibc gives blocks of that size back to the kernel at once, and
gets each of them again page by page: with batches of 2048 tokens that was a seventh of a forward's time (MiniLM,
bfloat16: 135 ms instead of 115).
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""As malloc.h numbers them."""

KEPT_BYTES: Final = 32 * 2**20
"""Blocks of up to so many bytes come from memory that is kept: glibc takes no more for threads other than the first.
They are also how much a thread keeps at the end of its memory, at most twice."""

_USER_HAS_SET: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Variables by which users tune glibc's allocator, or put another one in its place."""


def keep_freed_memory() -> bool:
    """Have the allocator keep what is freed, and say whether it does. Only glibc's is known; what users set stays."""
    if not _is_glibc() or any(name in os.environ for name in _USER_HAS_SET):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, 2 * KEPT_BYTES))


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # no such name, or no such function
        return False
