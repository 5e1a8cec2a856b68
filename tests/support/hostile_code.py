"""Code of users that lets out more than an `Exception`, for tests of the boundary to it."""

from __future__ import annotations

import asyncio
import math
from typing import Final, Literal, TypeAlias

import anyio
import anyio.lowlevel
import sniffio

Fault: TypeAlias = Literal["cancelled", "panics", "exits"]

FAULTS: Final[tuple[Fault, ...]] = ("cancelled", "panics", "exits")
"""A cancellation that no scope has asked for; a panic, as of a library in Rust; `SystemExit`."""


class PanicException(BaseException):
    """Stands for the error of a library in Rust."""


def kind_of_fault(fault: Fault) -> str:
    """Return a pattern of the name by which a caller hears of a fault."""
    return {"cancelled": "(CancelledError|Cancelled)", "panics": "PanicException", "exits": "SystemExit"}[fault]


def fail_plainly(fault: Fault) -> None:
    """Let a fault out of a plain call. Its cancellation is that which `asyncio.run` leaks in a thread."""
    if fault == "panics":
        raise PanicException("a panic")
    if fault == "exits":
        raise SystemExit(3)
    raise asyncio.CancelledError


async def fail_awaited(fault: Fault) -> None:
    """Let a fault out of an await. Its cancellation is that of a task, or of a scope, that somebody else cancelled."""
    await anyio.lowlevel.checkpoint()
    if fault != "cancelled":
        fail_plainly(fault)
    elif sniffio.current_async_library() == "asyncio":
        await _cancelled_task()
    else:
        raise await _cancelled_scope()


async def _cancelled_task() -> None:
    task = asyncio.get_running_loop().create_task(asyncio.sleep(math.inf))
    task.cancel()
    await task


async def _cancelled_scope() -> BaseException:
    """Return the cancellation of a scope, which its owner has kept."""
    kept: BaseException = RuntimeError("there was no cancellation")
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.lowlevel.checkpoint()
        except BaseException as error:
            kept = error
            raise
    return kept
