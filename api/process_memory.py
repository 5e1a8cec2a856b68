"""What the kernel, the allocator and the garbage collector are told about memory.

Memory that is freed stays with the process, for whoever asks next. A forward allocates and frees megabytes at every
layer. glibc gives blocks of that size back to the kernel at once, and gets each of them again page by page: with
batches of 2048 tokens that was a seventh of a forward's time (MiniLM, bfloat16: 135 ms instead of 115).
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, cast

from staged_pool.runtime.memory.allocator import is_glibc

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""As malloc.h numbers them."""

KEPT_BYTES: Final = 32 * 2**20
"""Blocks of up to so many bytes come from memory that is kept: glibc takes no more for threads other than the first.
They are also how much a thread keeps at the end of its memory, at most twice."""

_MADV_DONTNEED: Final = 4
"""As mman.h of Linux numbers it."""

COLLECTED_AFTER: Final = 50_000
"""Objects that are made and not given up before the collector looks at them. A request in hand is about a hundred, and
leaves none: all are gone with it, without the collector. Python's own 700 are seven requests, so with a thousand in
hand (twice as many short texts as can be answered) it looked at what is in use dozens of times a second, for 50 ms and
more each second or two; with this, a fifth more was answered, and the slowest rejections took a third of the time."""

_WEIGHTS: Final = ".safetensors"

_USER_HAS_SET: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Variables by which users tune glibc's allocator, or put another one in its place."""


def keep_freed_memory() -> bool:
    """Have the allocator keep what is freed, and say whether it does. Only glibc's is known; what users set stays."""
    if not is_glibc() or any(name in os.environ for name in _USER_HAS_SET):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, 2 * KEPT_BYTES))


def spare_the_collector() -> None:
    """Have the garbage collector, which stops every thread, look at little, and seldom.

    What torch and the model have made are hundreds of thousands of objects that stay: it forgets them. A full
    collection would look at all of them, for a quarter second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECTED_AFTER)


def let_go_of_weight_files() -> None:
    """Have the kernel take from this process what it has read of files of weights, and not changed.

    Such a file is mapped. Of all that loading has read of it, what was laid out anew is not read again, and the rest
    comes back as it is used, for the system still has it: of MiniLM's 91 MB the process holds 77, and needs the vectors
    of the tokens that it is sent.
    """
    if _madvise is None:
        return
    with suppress(OSError):  # a sandbox without /proc
        for start, end in _unchanged_mappings(Path("/proc/self/smaps").read_text(), _WEIGHTS):
            _madvise(start, end - start, _MADV_DONTNEED)


def _unchanged_mappings(smaps: str, suffix: str) -> Iterator[tuple[int, int]]:
    """Where files with this suffix are mapped of which no page was written to, which would be lost: start and end.

    Args:
        smaps: As of `/proc/PID/smaps`: for each mapping a line that begins with its addresses and ends with its file,
            and then a line for each of its figures.
        suffix: Of the files.
    """
    mapping = None
    for line in smaps.splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            start, _, end = first.partition("-")
            mapping = (int(start, 16), int(end, 16)) if line.endswith(suffix) else None
        elif first == "Anonymous:" and mapping is not None and rest.split()[0] == "0":
            yield mapping


def _find_madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return cast("Callable[[int, int, int], int]", madvise)


_madvise: Final = _find_madvise()
