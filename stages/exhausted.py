"""Failed allocations, told from other failures: nothing is wrong with the request, and a retry may succeed."""

from __future__ import annotations

import errno
from typing import Final

from staged_pool.stages.errors import OutOfMemory
from staged_pool.stages.log import get_logger

_WORDS: Final = (
    "out of memory", "not enough memory", "allocate memory", "memory allocation", "could not create a memory object",
    "bad_alloc", "bad allocation", "STATUS_ALLOC_FAILED", "can't start new thread",
)  # fmt: skip
"""Of torch, oneDNN, CUDA's libraries, the C++ library, Rust's panics, and Python for a thread without a stack."""

_CHAIN: Final = 8
"""Causes of an error that are looked at."""

log = get_logger("staged_pool.stages")


def is_out_of_memory(error: BaseException) -> bool:
    """True if an allocation failed: by the class of an error or of its cause, or by words of a library in C++ or Rust.

    Only errors without a class of their own are known by their words: a text of a caller may hold the same ones.
    """
    cause: BaseException | None = error
    for _ in range(_CHAIN):
        if cause is None:
            return False
        if isinstance(cause, MemoryError | OutOfMemory) or getattr(cause, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(cause, RuntimeError) or type(cause).__name__ == "PanicException":
            text = str(cause)
            if any(word in text for word in _WORDS):
                return True
        cause = cause.__cause__
    return False


def exhausted(error: BaseException, stage: str) -> OutOfMemory:
    """Log a failed allocation, and make the error for the caller, which lends no words of an allocator."""
    log.error("memory.exhausted", stage=stage, error=type(error).__name__, reason=str(error)[:200])
    return OutOfMemory(f"There was no memory for this request in the {stage} stage; it may be sent again.")
