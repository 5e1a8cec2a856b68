"""Ends of user code that are no `Exception`: each must fail the call, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import anyio.lowlevel
import pytest
import sniffio


class RustPanic(BaseException):
    """As libraries in Rust raise it: their class is no `Exception` either."""


async def stray_cancellation() -> None:
    """Let out a cancellation that nobody has asked this task for.

    On asyncio, await a task that was cancelled. On trio, raise the cancellation of a scope after its end.
    """
    if sniffio.current_async_library() == "asyncio":
        other = asyncio.create_task(asyncio.sleep(3600))
        await asyncio.sleep(0)
        other.cancel()
        await other
        return
    kept: list[BaseException] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.lowlevel.checkpoint()
        except anyio.get_cancelled_exc_class() as error:
            kept.append(error)
            raise
    raise kept.pop()


@dataclass(frozen=True, slots=True)
class BadEnd:
    """One end of user code."""

    kind: str
    """Beginning of the name of its class, which the error to the caller tells."""
    error: Callable[[], BaseException] | None
    """Makes the error. None: a stray cancellation."""

    async def awaited(self, *_: object) -> None:
        """End so in a coroutine."""
        await anyio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error()
        await stray_cancellation()

    def called(self, *_: object) -> None:
        """End so in a plain function, as after `asyncio.run` of a coroutine that was cancelled."""
        raise asyncio.CancelledError if self.error is None else self.error()


STRAY_CANCELLATION = BadEnd("Cancel", None)

BAD_ENDS = [
    pytest.param(BadEnd("RustPanic", lambda: RustPanic("boom")), id="panic"),
    pytest.param(BadEnd("SystemExit", lambda: SystemExit(3)), id="exit"),
    pytest.param(BadEnd("GeneratorExit", GeneratorExit), id="generator exit"),
    pytest.param(STRAY_CANCELLATION, id="stray cancellation"),
]
