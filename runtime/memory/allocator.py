"""Allocator of the C library, which keeps freed memory until told otherwise."""

from __future__ import annotations

import ctypes
import os


def is_glibc() -> bool:
    """Return True if this process uses glibc. No other allocator is supported."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # the system has no such name, or no confstr
        return False


def give_back_freed_memory() -> None:
    """Return freed memory to the kernel, single pages in the middle of the heap included.

    Loading a model frees whole layers after it has prepacked their weights: 0.6 of 1.8 GB for a CLIP (ViT-B/32,
    float32). `python -m perf memory` measures the server's.
    """
    if is_glibc():
        ctypes.CDLL(None).malloc_trim(0)
