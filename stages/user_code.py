"""The boundary to code of users: each call and each await of it is in a block of `user_code`.

Code of users may raise more than an `Exception`. A library in Rust panics, a thread ends by `SystemExit`, and a
coroutine lets out a cancellation that somebody else has asked for: it awaited a task that was cancelled. Past the
boundary these are errors of the call like any other. Only the scopes around the call end its task.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, TypeVarTuple

import anyio
import sniffio

Args = TypeVarTuple("Args")

STRAY: Final = "a cancellation that no scope around the call has asked for"


class Panic(Exception):
    """An error of user code that is no `Exception`: a panic, `SystemExit`, or a stray cancellation.

    Args:
        kind: Name of the error's class.
        message: The error in words.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind

    def __str__(self) -> str:
        return ": ".join(self.args)


def as_exception(error: BaseException) -> Exception:
    """Return an error of a plain call or of a thread as an `Exception`: it must end the call, not the host.

    No scope cancels a plain call, so a cancellation from it is a stray one.
    """
    if isinstance(error, Exception):
        return error
    panic = Panic(type(error).__name__, STRAY if isinstance(error, asyncio.CancelledError) else str(error))
    panic.__cause__ = error
    return panic


def kind_of(error: BaseException) -> str:
    """Return the name of an error's class, for the message to a caller."""
    return error.kind if isinstance(error, Panic) else type(error).__name__


def as_text(error: BaseException) -> str:
    """Return an error with the name of its class, for an operator."""
    return str(error) if isinstance(error, Panic) else f"{type(error).__name__}: {error}"


def was_asked_for(error: BaseException) -> bool:
    """Return True for a cancellation by a scope around the code that asks."""
    return _is_cancellation(error) and anyio.current_effective_deadline() == -math.inf


class UserCode:
    """A block that calls user code (`with`), or awaits it (`async with`); made by `user_code`."""

    __slots__ = ("_cancels", "_is_own_task", "_task")

    def __init__(self, *, is_own_task: bool) -> None:
        self._is_own_task = is_own_task
        self._cancels = 0
        self._task: object = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception | KeyboardInterrupt):
            raise as_exception(error) from error

    async def __aenter__(self) -> None:
        self._cancels = _native_cancels()
        self._task = _running_task()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._is_being_closed():
            return
        if error is None or isinstance(error, Exception):
            await self._take_back()
            return
        if isinstance(error, KeyboardInterrupt) or was_asked_for(error):
            return
        if _is_cancellation(error):
            if _native_cancels() > self._cancels and (not self._is_own_task or _loop_is_ending()):
                return  # the host has cancelled the task of the caller, or all tasks, by asyncio's own means
            await self._take_back()
            raise Panic(type(error).__name__, STRAY) from error
        raise as_exception(error) from error

    def _is_being_closed(self) -> bool:
        """Return True if the coroutine of the block is closed from outside: its task does not run."""
        try:
            return _running_task() != self._task
        except RuntimeError:  # no event loop runs
            return True

    async def _take_back(self) -> None:
        """Take back a cancel that the code has asked for itself: it would strike at the next await of ours."""
        if not self._is_own_task or _native_cancels() <= self._cancels:
            return
        if anyio.current_effective_deadline() > -math.inf:  # else it may be that of a scope
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            _forget_native_cancels(self._cancels)


def user_code(*, is_own_task: bool = True) -> UserCode:
    """Return a block that calls user code, by `with`, or awaits it, by `async with`.

    An error of the block that is no `Exception` becomes a `Panic`. `KeyboardInterrupt` passes, for it is the
    operator's. So do a cancellation of an awaiting block by a scope around it, and the end of its coroutine by `close`.

    Args:
        is_own_task: The block runs in a task of ours, which nobody but scopes cancels, and the end of the event loop.
            False: it runs in the task of a caller, which a host may cancel by asyncio's own means.
    """
    return UserCode(is_own_task=is_own_task)


async def run_guarded(function: Callable[[*Args], Awaitable[object]], *args: *Args) -> None:
    """Await a function as a task of a group whose silent end would lose work.

    A task that ends by a cancellation ends its group, too, and the group tells nobody.
    """
    async with user_code():
        await function(*args)


def _is_cancellation(error: BaseException) -> bool:
    cancelled = anyio.get_cancelled_exc_class()
    return isinstance(error, cancelled) or (
        isinstance(error, BaseExceptionGroup) and error.subgroup(cancelled) is not None
    )


def _running_task() -> object:
    """Return what identifies the running task."""
    is_asyncio = sniffio.current_async_library() == "asyncio"
    return asyncio.current_task() if is_asyncio else anyio.get_current_task().id


def _native_cancels() -> int:
    """Return how often asyncio's own means have cancelled the running task; 0 on trio."""
    if sniffio.current_async_library() != "asyncio" or (task := asyncio.current_task()) is None:
        return 0
    return task.cancelling()


def _loop_is_ending() -> bool:
    """Return True if all tasks are cancelled, as `asyncio.run` does at its end."""
    return all(task.cancelling() for task in asyncio.all_tasks())


def _forget_native_cancels(down_to: int) -> None:
    """Take back cancels of the running task. Only the user code in it can have asked for them."""
    if sniffio.current_async_library() == "asyncio" and (task := asyncio.current_task()) is not None:
        while task.cancelling() > down_to:
            task.uncancel()
