"""The memory governor: what a process may take, what it takes, and what it gives up as it comes near.

The budget counts what requests bring along. It cannot count everything: a tokenizer, a decoder or a driver takes what
it takes. So the governor looks at the real figures, and the nearer they come to the limit the less is done at once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

import anyio
import anyio.to_thread

from staged_pool.runtime.machine.memory import Machine
from staged_pool.runtime.memory.allocator import give_back_freed_memory
from staged_pool.runtime.memory.budget import MemoryBudget
from staged_pool.stages.errors import Overloaded
from staged_pool.stages.exhausted import exhausted, is_out_of_memory
from staged_pool.stages.log import get_logger

EVERY_S: Final = 0.25
"""Seconds between two looks. Reading the figures takes some 50 microseconds."""

IDLE_S: Final = 5.0
"""Seconds without requests after which freed memory goes back to the system, if there may be much of it."""

MUCH_BYTES: Final = 64 * 2**20
"""Growth since the last time that makes it worth while: what is given back is taken anew page by page."""

RETRY_AFTER_S: Final = 1.0
"""Seconds after which a rejected request may come again: four looks, and what is in work has had its time to end."""

REQUESTS_FROM: Final = 0.85
"""Part of the limit up to which the model and the requests may take together. What is above is for what no account
knows, and it is where the governor begins to act."""

UNLIMITED_BYTES: Final = 2**62
"""A limit that is never reached."""

LEAST_BUDGET_BYTES: Final = 256 * 2**20
"""The budget of requests where the model leaves less than this: its share of bodies has room for two large ones."""

log = get_logger("staged_pool.memory")


class Pressure(enum.IntEnum):
    """How near the process is to its memory limit, in percent of it."""

    NONE = 0
    SMALLER_BATCHES = 85
    """Batches stay small, and caches are emptied. Freed memory goes back to the system, here and above."""
    NO_KEEP_ALIVE = 92
    """Connections close after their answer, and idle ones at once."""
    REJECT = 95
    """New requests are rejected."""


class MemoryGovernor:
    """Watches the memory of this process, and says what is to be given up. It belongs to one event loop.

    Args:
        limit_bytes: Bytes that this process may have. None: as `Machine.limit_bytes` says.
        machine: Gives the real figures.
    """

    def __init__(self, limit_bytes: int | None = None, machine: Machine | None = None) -> None:
        self._machine = machine or Machine()
        self._asked_bytes = limit_bytes
        self.limit_bytes = limit_bytes or UNLIMITED_BYTES
        """Bytes that this process may have."""
        self.budget = MemoryBudget(self.limit_bytes)
        """What requests may hold of them."""
        self.fullness = 0.0
        """Used part of the limit at the last look."""
        self.pressure = Pressure.NONE
        self._listeners: list[Callable[[Pressure], object]] = []
        self._is_busy: list[Callable[[], bool]] = []
        self._idle_looks = 0
        self._trimmed_bytes = 0
        """Resident set when freed memory last went back."""

    def measure(self, reserved_bytes: int = 0) -> None:
        """Give requests what everything else leaves. FileReads files: call it in a thread.

        Call it before models are loaded, for what the machine has, and again when they are.

        Args:
            reserved_bytes: Bytes that caches may take.
        """
        if self.limit_bytes == UNLIMITED_BYTES:
            self.limit_bytes = self._asked_bytes or self._machine.limit_bytes()
        self._trimmed_bytes = self._machine.resident_bytes()
        if (room := self._machine.mappable_bytes()) is not None:  # libraries that were loaded meanwhile count in it
            self.limit_bytes = min(self.limit_bytes, self._trimmed_bytes + room)
        taken = self._trimmed_bytes + reserved_bytes
        left = int(REQUESTS_FROM * self.limit_bytes) - taken
        if left < LEAST_BUDGET_BYTES:
            log.warning("memory.little_left", limit_mb=self.limit_bytes // 10**6, taken_mb=taken // 10**6)
        self.budget.resize(max(left, LEAST_BUDGET_BYTES))

    def rejection(self) -> Overloaded:
        """Return the error of a request that comes while there is no memory for it."""
        message = f"The server is short of memory: {self.fullness:.0%} of its limit are in use."
        return Overloaded(message, retry_after_s=RETRY_AFTER_S)

    def listen(self, listener: Callable[[Pressure], object], is_busy: Callable[[], bool]) -> Callable[[], None]:
        """Tell somebody of each change of pressure.

        Args:
            listener: Gets the new pressure.
            is_busy: Asked if it has requests: freed memory goes back once nobody has.

        Returns:
            A function that ends this.
        """
        self._listeners.append(listener)
        self._is_busy.append(is_busy)

        def leave() -> None:
            self._listeners.remove(listener)
            self._is_busy.remove(is_busy)

        return leave

    async def watch(self) -> None:
        """Look again and again, until cancelled. A look that there is no memory for, or no thread, is left out."""
        while True:
            await anyio.sleep(EVERY_S)
            try:
                fullness = await anyio.to_thread.run_sync(self._machine.fullness, self.limit_bytes)
                if self.look(fullness):
                    await anyio.to_thread.run_sync(self._trim)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                exhausted(error, "memory")

    def look(self, fullness: float) -> bool:
        """Take note of how full memory is, and tell of a change of pressure.

        Args:
            fullness: Used part of the limit.

        Returns:
            True: freed memory should go back to the system now.
        """
        self.fullness = fullness
        pressure = max(level for level in Pressure if 100 * fullness >= level)
        was, self.pressure = self.pressure, pressure
        if pressure != was:
            say = log.warning if pressure > was else log.info
            say("memory.pressure", used=round(fullness, 3), limit_mb=self.limit_bytes // 10**6, level=pressure.name)
            for listener in tuple(self._listeners):
                listener(pressure)
        self._idle_looks = 0 if any(is_busy() for is_busy in self._is_busy) else self._idle_looks + 1
        return pressure > Pressure.NONE or self._idle_looks == round(IDLE_S / EVERY_S)

    def _trim(self) -> None:
        """Give freed memory back to the system, if there may be much of it or little is left."""
        if self.pressure or self._machine.resident_bytes() > self._trimmed_bytes + MUCH_BYTES:
            give_back_freed_memory()
            self._trimmed_bytes = self._machine.resident_bytes()
