"""Worker processes, for parts that must not share an interpreter."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

from staged_pool.api.process_memory import keep_freed_memory

A = TypeVar("A")
R = TypeVar("R")


class Worker(Generic[A, R]):
    """Process that answers calls, one at a time."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def begin(self, argument: A) -> None:
        """Start a call; `end` waits for it, so that several workers can run concurrently."""
        self._pipe.send(argument)

    def end(self, limit_s: float | None = None) -> R:
        """Wait for the call that was started, and return its result.

        Args:
            limit_s: Limit of the wait, in seconds. None: there is none.

        Raises:
            RuntimeError: The call raised, or the process died.
            TimeoutError: The limit passed; the worker cannot be used any more.
        """
        if not self._pipe.poll(limit_s):
            raise TimeoutError(f"a worker process has not answered for {limit_s:g} s")
        try:
            failure, result = self._pipe.recv()
        except EOFError:
            raise RuntimeError("a worker process died; its output is above") from None
        if failure is not None:
            raise RuntimeError(f"a worker process failed: {failure}")
        value: R = result
        return value

    def __call__(self, argument: A) -> R:
        self.begin(argument)
        return self.end()


@contextmanager
def worker(make: Callable[[], Callable[[A], R]]) -> Iterator[Worker[A, R]]:
    """Start a process; it is terminated at the end of the block.

    Args:
        make: Called in the new process; returns the function that answers the calls. Pickled, as are all arguments
            and results.
    """
    context = multiprocessing.get_context("spawn")  # not fork: the process must not inherit our state
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, make), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Worker(ours)
    finally:
        process.terminate()
        process.join()
        ours.close()


def pinned(make: Callable[[], Callable[[A], R]]) -> Callable[[A], R]:
    """Pin the process of a client to one core, for a constant share of CPU."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    return make()


def _serve(pipe: Connection, make: Callable[[], Callable[[A], R]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends this process
    keep_freed_memory()  # as the server does, for a fair comparison
    answer = make()
    while True:
        try:
            argument = pipe.recv()
        except EOFError:
            return
        outcome: tuple[str | None, R | None]
        try:
            outcome = (None, answer(argument))
        except Exception as error:  # noqa: BLE001  # carried to the parent, where not every class can be unpickled
            outcome = (f"{type(error).__name__}: {error}", None)
        pipe.send(outcome)
