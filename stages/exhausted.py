"""Failed allocations, told from other failures: the request is right, and a retry may succeed."""

from __future__ import annotations

import errno
from typing import Final

from staged_pool.stages.errors import OutOfMemory
from staged_pool.stages.log import get_logger

_WORDS: Final = (
    "out of memory", "not enough memory", "allocate memory", "memory allocation", "could not create a memory object",
    "bad_alloc", "bad allocation", "STATUS_ALLOC_FAILED", "can't start new thread",
)  # fmt: skip
"""Words in the messages of failed allocations.

They come from torch, oneDNN, the CUDA libraries, the C++ library, Rust panics, and Python for a thread's stack.
"""

_CHAIN: Final = 8
"""Length of the chain of causes that is searched."""

log = get_logger("staged_pool.stages")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error, or one of its causes, is a failed allocation.

    Libraries in C++ and Rust have no error class for this, so the words of their errors are searched. Other errors are
    told by class alone: their messages may hold a caller's text.
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
    """Log a failed allocation, and return the error for the caller, without internal details."""
    log.error("memory.exhausted", stage=stage, error=type(error).__name__, reason=str(error)[:200])
    return OutOfMemory(f"There was no memory for this request in the {stage} stage; it may be sent again.")
