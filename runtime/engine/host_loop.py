"""The host's event loop, and a task of its own for an engine in it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final, Generic, TypeVar, cast

import anyio
import sniffio

T = TypeVar("T")


class HostLoop:
    """The event loop in which this object is made.

    Objects of one loop, such as events, would wait for ever in another.

    Args:
        subject: Name of the object that belongs to the loop, as the subject of error messages.
    """

    __slots__ = ("_library", "_loop", "_subject", "_thread")

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._library, self._loop = _running()
        self._thread = threading.current_thread().name

    def check(self) -> None:
        """Raise an error in a call from another event loop, which would hang otherwise.

        Raises:
            RuntimeError: Another event loop runs here, or none.
        """
        library, loop = _running()
        if loop is self._loop and loop is not None:
            return
        if isinstance(self._loop, asyncio.AbstractEventLoop) and self._loop.is_closed():
            where = f"belongs to an event loop of {self._library} that has ended: open one in each event loop"
        else:
            where = (
                f"belongs to another event loop ({self._library}'s, in thread {self._thread!r}): await it there, "
                "from another thread with `anyio.from_thread.run` or `asyncio.run_coroutine_threadsafe`"
            )
        raise RuntimeError(f"{self._subject} {where}. Here runs {f'one of {library}' if library else 'none'}.")


def _running() -> tuple[str, object]:
    """Return the library and the identity of the running event loop; ("", None) if there is none."""
    try:
        library = sniffio.current_async_library()
    except sniffio.AsyncLibraryNotFoundError:
        return "", None
    if library == "trio":
        import trio  # only if the host runs it

        return library, trio.lowlevel.current_trio_token()
    return library, asyncio.get_running_loop()


class OwnTask(AbstractAsyncContextManager[T, None], Generic[T]):
    """A context manager run in a task of its own: one task may enter it, and another leave it.

    A task group must be left by the task that has entered it. But a host may open an engine in one cell of a notebook
    and close it in another, or in the two halves of a fixture, which are different tasks. On trio the task is a system
    task. A context manager that is never left ends with the event loop.

    If entering is cancelled, it waits until the inner context manager is closed again. Leaving with an error cancels
    the inner block; leaving without one runs its normal end, which a cancellation cuts short.

    Args:
        opens: Makes the inner context manager; called once, in the task.
        name: Name of the task, for errors and debuggers.
    """

    def __init__(self, opens: Callable[[], AbstractAsyncContextManager[T]], name: str) -> None:
        self._opens = opens
        self._name = name
        self._home: HostLoop | None = None
        self._value: T | None = None
        self._error: BaseException | None = None

    async def __aenter__(self) -> T:
        if self._home is not None:
            raise RuntimeError(f"{self._name} was opened before: make another one")
        self._home = HostLoop(self._name)
        self._opened, self._leave, self._ended = anyio.Event(), anyio.Event(), anyio.Event()
        self._scope = anyio.CancelScope()
        _spawn(self._run, self._name)
        try:
            await self._opened.wait()
        except BaseException:
            await self._stop()
            raise
        self._raise_error()
        value, self._value = self._value, None
        return cast(T, value)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._home is None:
            raise RuntimeError(f"{self._name} was never opened")
        self._home.check()
        if kind is not None:
            await self._stop()
        else:
            self._leave.set()
            try:
                await self._ended.wait()
            except BaseException:
                await self._stop()
                raise
        self._raise_error()

    async def _run(self) -> None:
        try:
            with self._scope:
                async with self._opens() as self._value:
                    self._opened.set()
                    await self._leave.wait()
        except Exception as error:  # noqa: BLE001  # raised in the task that enters or leaves
            self._error = error
        finally:
            if not self._opened.is_set() and self._error is None:
                self._error = RuntimeError(f"{self._name} was stopped before it was open")
            self._opened.set()
            self._ended.set()

    async def _stop(self) -> None:
        """Cancel the task, and wait until it has ended."""
        self._scope.cancel()
        with anyio.CancelScope(shield=True):
            await self._ended.wait()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is None:
            return
        try:
            raise error
        finally:
            del error  # the traceback of the error now holds this frame


_TASKS: Final[set[asyncio.Task[None]]] = set()
"""Running tasks: asyncio itself keeps no strong reference to them."""


def _spawn(function: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    """Start a task that belongs to the event loop and to no task group."""
    if sniffio.current_async_library() == "trio":
        import trio  # only if the host runs it

        trio.lowlevel.spawn_system_task(function, name=name, context=contextvars.copy_context())
    else:
        task = asyncio.get_running_loop().create_task(function(), name=name)
        _TASKS.add(task)
        task.add_done_callback(_TASKS.discard)
