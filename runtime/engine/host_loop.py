"""The event loop of the host that an engine runs in, and a task of the engine's own in it."""

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
    """The event loop that runs where this is made. What is made in one loop would wait for ever in another."""

    __slots__ = ("_library", "_loop", "_thread")

    def __init__(self) -> None:
        self._library, self._loop = _running()
        self._thread = threading.current_thread().name

    def check(self, subject: str) -> None:
        """Raise at once what would hang otherwise. Takes less than a microsecond.

        Args:
            subject: What belongs to the loop, as the beginning of a sentence.

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
        raise RuntimeError(f"{subject} {where}. Here runs {f'one of {library}' if library else 'none'}.")


def _running() -> tuple[str, object]:
    """The library of the event loop that runs in this thread, and its identity; ("", None) where none does."""
    try:
        library = sniffio.current_async_library()
    except sniffio.AsyncLibraryNotFoundError:
        return "", None
    if library == "trio":
        import trio  # only where the host runs it

        return library, trio.lowlevel.current_trio_token()
    return library, asyncio.get_running_loop()


class OwnTask(AbstractAsyncContextManager[T, None], Generic[T]):
    """Run a context manager in a task of its own, so that any task of the event loop may enter and any may leave it.

    A task group must be left by the task that has entered it. A host may open an engine in one cell of a notebook and
    close it in another, or in a fixture and its end: each is a task of its own. On trio the task is a system task. One
    that is never left ends with the event loop.

    Entering, cancelled, waits until what was begun is undone. Leaving undoes at once what an error or a cancellation
    leaves, and otherwise runs the end of the context manager; cancelled, that is cut short.

    Args:
        opens: Makes the context manager; called once, in the task.
        name: Of the task.
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
        self._home = HostLoop()
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
        self._home.check(self._name)
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
        except Exception as error:  # noqa: BLE001  # it is for whoever enters or leaves
            self._error = error
        finally:
            if not self._opened.is_set() and self._error is None:
                self._error = RuntimeError(f"{self._name} was stopped before it was open")
            self._opened.set()
            self._ended.set()

    async def _stop(self) -> None:
        """Cancel what runs, and wait until it has ended."""
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
            del error  # this frame is in its traceback now


_TASKS: Final[set[asyncio.Task[None]]] = set()
"""Those that run: asyncio itself keeps none of its tasks alive."""


def _spawn(function: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    """Begin a task that belongs to the event loop and to no task group."""
    if sniffio.current_async_library() == "trio":
        import trio  # only where the host runs it

        trio.lowlevel.spawn_system_task(function, name=name, context=contextvars.copy_context())
    else:
        task = asyncio.get_running_loop().create_task(function(), name=name)
        _TASKS.add(task)
        task.add_done_callback(_TASKS.discard)
