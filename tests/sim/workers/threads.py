"""Threads in virtual time: one runs at a time, and a seed decides which."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from typing import Any

from tests.sim.clock import Stuck

MOST_SWITCHES = 10_000
"""Switches between threads in one run; more mean an endless loop."""


class Ended(BaseException):
    """The run has failed: a thread that still waits ends."""


class _Thread:
    def __init__(self) -> None:
        self.turn = threading.Semaphore(0)
        self.condition: Callable[[], bool] = lambda: True
        self.until: Callable[[], float] = lambda: math.inf


class VirtualThreads:
    """Real threads that hand one baton around. Each waits for conditions or times, and never otherwise.

    Args:
        rng: Chooses the next thread.
    """

    def __init__(self, rng: random.Random) -> None:
        self.now = 0.0
        self.errors: list[BaseException] = []
        """Errors that threads have ended by."""
        self._rng = rng
        self._threads: list[_Thread] = []
        self._running: _Thread
        self._back = threading.Semaphore(0)
        self._has_ended = False

    def start(self, function: Callable[[], object]) -> None:
        """Start a thread."""
        thread = _Thread()

        def run() -> None:
            thread.turn.acquire()
            try:
                if not self._has_ended:
                    function()
            except Ended:
                pass
            except BaseException as error:  # noqa: BLE001  # told by `run`
                self.errors.append(error)
            self._threads.remove(thread)
            self._back.release()

        self._threads.append(thread)
        threading.Thread(target=run, daemon=True).start()

    def run(self) -> None:
        """Run the threads to their ends.

        Raises:
            Stuck: They wait for nothing that will ever happen, or switch for ever.
        """
        switches = 0
        try:
            while self._threads:
                ready = [each for each in self._threads if each.until() <= self.now or each.condition()]
                switches += 1
                if switches > MOST_SWITCHES:
                    raise Stuck("the threads run on and on")
                if ready:
                    self._switch_to(self._rng.choice(ready))
                    continue
                self.now = min(each.until() for each in self._threads)
                if self.now == math.inf:
                    raise Stuck(f"{len(self._threads)} threads wait, and for nothing that will ever happen")
        finally:
            self._has_ended = True
            while self._threads:
                self._switch_to(self._threads[0])

    def wait(self, condition: Callable[[], bool], until: Callable[[], float] = lambda: math.inf) -> None:
        """Wait until a condition holds, or until a time. Other threads may run in any case."""
        if self._has_ended:
            raise Ended
        thread = self._running
        thread.condition, thread.until = condition, until
        self._back.release()
        thread.turn.acquire()
        if self._has_ended:
            raise Ended

    def sleep_until(self, time: float) -> None:
        """Wait until a time."""
        self.wait(lambda: False, lambda: time)

    def _switch_to(self, thread: _Thread) -> None:
        self._running = thread
        thread.turn.release()
        self._back.acquire()


class VirtualCondition:
    """A `threading.Condition` of virtual threads."""

    def __init__(self, threads: VirtualThreads) -> None:
        self._threads = threads
        self._is_held = False
        self._waiting: list[list[bool]] = []
        """Waiters in their order; each holds True once it is notified."""

    def __enter__(self) -> None:
        self._threads.wait(lambda: not self._is_held)
        self._is_held = True

    def __exit__(self, *error: Any) -> None:
        self._is_held = False

    def wait(self) -> None:
        waiter = [False]
        self._waiting.append(waiter)
        self._is_held = False
        self._threads.wait(lambda: waiter[0] and not self._is_held)
        self._is_held = True

    def notify(self) -> None:
        if self._waiting:
            self._waiting.pop(0)[0] = True

    def notify_all(self) -> None:
        while self._waiting:
            self.notify()
