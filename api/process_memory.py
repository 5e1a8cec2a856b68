"""Memory settings of the process: allocator, garbage collector and mapped weight files.

A forward allocates and frees megabytes at every layer. By default glibc returns blocks of that size to the kernel at
once, and gets them again page by page, which makes forwards slower. So freed memory stays with the process for the next
allocation.
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

from staged_pool.runtime.memory.allocator import give_back_freed_memory, is_glibc

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""Numbers of `mallopt` parameters in malloc.h."""

KEPT_BYTES: Final = 32 * 2**20
"""Maximum size of blocks in memory that is kept: glibc allows no more for threads other than the first.

A thread's heap keeps up to twice as much unused memory at its end.
"""

_MADV_DONTNEED: Final = 4
"""Number of this advice in Linux's mman.h."""

COLLECTED_AFTER: Final = 50_000
"""New objects after which the garbage collector runs.

A request is about a hundred objects, which reference counting frees without the collector. With Python's own default
of 700 the collector would run every seven requests, and scan all requests in progress each time.
"""

_WEIGHTS: Final = ".safetensors"

_USER_HAS_SET: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Environment variables by which users tune or replace glibc's allocator."""


def keep_freed_memory() -> bool:
    """Make glibc's allocator keep freed memory.

    Returns:
        False with another allocator, or if the user has tuned it: then nothing changes.
    """
    if not is_glibc() or any(name in os.environ for name in _USER_HAS_SET):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, 2 * KEPT_BYTES))


def tune_garbage_collector() -> None:
    """Make the garbage collector, which stops all threads, run rarely and on few objects.

    torch and the model consist of hundreds of thousands of permanent objects, which are excluded from collection. A
    full collection would scan all of them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECTED_AFTER)


def collect_garbage() -> None:
    """Free what an unloaded model has left, and return it to the system.

    That is Python objects in reference cycles, without weights. Where all other objects are frozen, as by
    `tune_garbage_collector`, they are found in milliseconds. Elsewhere the collector finds them in its own time.
    """
    if gc.get_freeze_count():
        gc.collect()
    give_back_freed_memory()
    release_weight_pages()


def release_memory_of_loading() -> None:
    """Give back what loading has left: freed memory, and pages of weight files."""
    give_back_freed_memory()
    release_weight_pages()


def release_weight_pages() -> None:
    """Release the unmodified pages of mapped weight files.

    Loading has read all of a file. Weights that were copied to another layout are not read again. Other pages, such as
    those of a large token embedding, come back from the page cache when they are used.
    """
    if _madvise is None:
        return
    with suppress(OSError):  # some sandboxes have no /proc
        for start, end in _unchanged_mappings(Path("/proc/self/smaps").read_text(), _WEIGHTS):
            _madvise(start, end - start, _MADV_DONTNEED)


def _unchanged_mappings(smaps: str, suffix: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of mappings of files with a suffix.

    Mappings with a modified page are left out: releasing that page would lose its changes.

    Args:
        smaps: Text of `/proc/PID/smaps`. Each mapping has a line with its addresses first and its file last, followed
            by one line per figure.
        suffix: Suffix of the files.
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
