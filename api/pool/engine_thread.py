"""A thread with an event loop of its own, in which an engine runs."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final, Literal, TypeAlias, TypeVar

import anyio
import sniffio
from anyio.from_thread import BlockingPortal

from staged_pool.runtime.engine.engine import Engine
from staged_pool.stages.errors import EngineStopped, StageFailed
from staged_pool.stages.user_code import Panic, kind_of, user_code

R = TypeVar("R")

Backend: TypeAlias = Literal["asyncio", "trio"]
Opens: TypeAlias = Callable[[], AbstractAsyncContextManager[Engine]]
"""Opens an engine, as `open_engine` does."""

CALL: Final = "call"
"""Stage of a function that another thread has the event loop run."""

CLOSED: Final = "The pool is closed: make another one."


class _Start:
    """Start of a call by another thread. If it is interrupted, that thread has no future to cancel the call by."""

    def __init__(self) -> None:
        self._scope: anyio.CancelScope | None = None
        self._is_dropped = False

    def scope(self) -> anyio.CancelScope:
        """Return the scope of the call, in the event loop."""
        self._scope = anyio.CancelScope()
        if self._is_dropped:
            self._scope.cancel()
        return self._scope

    def drop(self, portal: BlockingPortal) -> None:
        """Cancel the call, or prevent it, in the other thread."""
        self._is_dropped = True  # first: the event loop sets the scope, and then looks here
        if self._scope is not None:
            portal.start_task_soon(self._scope.cancel)


class _Calls:
    """Calls of other threads that run in the event loop."""

    def __init__(self, engine: Engine, portal: BlockingPortal) -> None:
        self.engine = engine
        self.portal = portal
        self._running = 0
        self._idle = anyio.Event()
        self._leave = anyio.Event()
        self._drains = False

    async def run(self, use: Callable[[Engine], Awaitable[R]], start: _Start) -> R:
        self._running += 1
        try:
            with start.scope():
                async with user_code():
                    return await use(self.engine)
            raise EngineStopped("The start of the call was interrupted.")  # for nobody
        except Panic as panic:
            raise StageFailed(f"The function of the call failed: {kind_of(panic)}.", stage=CALL) from panic
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
                self._idle = anyio.Event()

    def leave(self, drain: bool) -> None:
        """Make `serve` end. True: it finishes the running calls, for as long as a drain may take."""
        self._drains = drain
        self._leave.set()

    async def serve(self) -> None:
        """Take calls until `leave`."""
        await self._leave.wait()
        await self.portal.stop()
        if self._drains and self._running:
            with anyio.move_on_after(self.engine.config.drain_timeout_s):
                await self._idle.wait()
        await self.portal.stop(cancel_remaining=True)


class EngineThread:
    """Thread with an event loop, in which an engine runs until `end`. It starts at once.

    It is a daemon: the interpreter does not wait for it, but runs exit handlers first, and one of these ends it. All
    methods may be called from any other thread of the process.

    Args:
        opens: Opens the engine, in the thread.
        backend: Event loop of the thread. asyncio is uvloop where that is installed.
    """

    def __init__(self, opens: Opens, backend: Backend) -> None:
        self._process = os.getpid()
        self._opened: Future[_Calls] = Future()
        # A function without the thread's owner: a collected owner ends the thread.
        arguments = (opens, backend, self._opened)
        self._thread = threading.Thread(target=_run, args=arguments, name="staged-pool event loop", daemon=True)
        self._thread.start()

    def engine(self) -> Engine:
        """Wait until the engine is open, and return it. Its methods belong to the thread.

        Raises:
            ConfigError: The model cannot be loaded.
            RuntimeError: A fork has no copy of the thread.
        """
        return self._reach().engine

    def submit(self, use: Callable[[Engine], Awaitable[R]]) -> Future[R]:
        """Run `use` with the engine in the event loop. Cancelling the future cancels it.

        Raises:
            EngineStopped: The thread has ended.
            RuntimeError: The caller is a fork, or the thread itself, which must not wait for itself.
        """
        calls, start = self._reach(), _Start()
        try:
            return _outside_trio(lambda: calls.portal.start_task_soon(calls.run, use, start))
        except RuntimeError as error:  # its portal is closed
            raise EngineStopped(CLOSED) from error
        except KeyboardInterrupt:
            start.drop(calls.portal)
            raise

    def end(self, *, drain: bool = False) -> None:
        """End the thread, and wait for its end. While the model loads, wait for that first.

        Args:
            drain: Finish the requests in flight, for at most `drain_timeout_s`. Otherwise they are cancelled.
        """
        if self._process != os.getpid():
            return  # a fork has no copy of the thread, and shares its sockets
        if threading.current_thread() is self._thread:  # where the collector ran: it must not wait for itself
            self._opened.result().leave(drain)
            return
        if self._opened.exception() is None:
            calls = self._opened.result()
            with suppress(RuntimeError):  # it has ended already
                _outside_trio(lambda: calls.portal.start_task_soon(calls.leave, drain))
        self._thread.join()
        self._opened = Future()  # the old one keeps the model
        self._opened.set_exception(EngineStopped(CLOSED))

    @property
    def failed(self) -> bool:
        """True if the engine could not be opened, or has ended."""
        return self._opened.done() and self._opened.exception() is not None

    def _reach(self) -> _Calls:
        if self._process != os.getpid():
            raise RuntimeError(
                f"This pool was opened in process {self._process}, and a fork has no copy of its thread: make another "
                "Pool in this process, or start processes with the method `spawn`."
            )
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "This is the pool's own event loop, which a blocking call would stop: await the engine's methods."
            )
        return self._opened.result()


def result_of(future: Future[R]) -> R:
    """Wait for a future of `EngineThread.submit`. If interrupted, as by Ctrl-C, cancel its work.

    Raises:
        EngineStopped: The pool was closed meanwhile.
    """
    try:
        return future.result()
    except CancelledError as error:
        raise EngineStopped("The pool was closed before the result was there.") from error
    except BaseException:
        future.cancel()
        raise


def _outside_trio(reach: Callable[[], R]) -> R:
    """Call a function that reaches the event loop of another thread. Where trio runs, that takes a helper thread.

    trio rejects such a call in a thread of its own, even if another thread is meant.
    """
    try:
        in_trio = sniffio.current_async_library() == "trio"
    except sniffio.AsyncLibraryNotFoundError:
        in_trio = False
    if not in_trio:
        return reach()
    with ThreadPoolExecutor(1, "staged-pool helper") as helper:
        return helper.submit(reach).result()


def _run(opens: Opens, backend: Backend, opened: Future[_Calls]) -> None:
    try:
        anyio.run(_serve, opens, opened, backend=backend, backend_options=_options(backend))
    except BaseException as error:
        if opened.done():
            raise
        opened.set_exception(error)  # raised in the threads that wait for the engine


async def _serve(opens: Opens, opened: Future[_Calls]) -> None:
    async with opens() as engine, BlockingPortal() as portal:
        calls = _Calls(engine, portal)
        opened.set_result(calls)
        await calls.serve()


def _options(backend: Backend) -> dict[str, Any]:
    uvloop = backend == "asyncio" and importlib.util.find_spec("uvloop") is not None
    return {"use_uvloop": True} if uvloop else {}
