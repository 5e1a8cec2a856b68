"""A gate that holds a thread, so that a test decides the order of events."""

from __future__ import annotations

import threading

import anyio


class Gate:
    """Holds a thread until the test opens it; the test can wait until a thread has arrived."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._arrived = threading.Event()

    def __call__(self, _texts: object = None) -> None:
        self._arrived.set()
        if not self._open.wait(timeout=30):
            raise TimeoutError("the test never opened the gate")

    def open(self) -> None:
        self._open.set()

    async def arrived(self) -> None:
        """Wait until a thread stands at the gate."""
        if not await anyio.to_thread.run_sync(self._arrived.wait, 30):
            raise TimeoutError("no thread came to the gate")
