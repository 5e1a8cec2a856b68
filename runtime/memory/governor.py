"""Memory governor: reduces the server's work as its memory use nears the limit.

The budget counts the bytes of requests. It cannot count the memory of tokenizers, decoders and drivers. So the governor
reads the real memory use of the process.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import anyio
import anyio.to_thread

from staged_pool.runtime.machine.memory import Machine
from staged_pool.runtime.memory.allocator import give_back_freed_memory
from staged_pool.runtime.memory.budget import MemoryBudget
from staged_pool.stages.errors import ConfigError, OutOfMemory, Overloaded
from staged_pool.stages.exhausted import exhausted, is_out_of_memory
from staged_pool.stages.log import get_logger

CHECK_INTERVAL_S: Final = 0.25
"""Seconds between two checks. A check takes about 50 microseconds."""

IDLE_S: Final = 5.0
"""Seconds without requests, after which freed memory is returned to the system."""

TRIM_GROWTH_BYTES: Final = 64 * 2**20
"""Growth since the last trim that makes another one worthwhile: returned memory has to be mapped again page by page."""

RETRY_AFTER_S: Final = 1.0
"""Retry-After in seconds: four checks, and time for running requests to end."""

REQUESTS_FROM: Final = 0.85
"""Fraction of the limit for the model and all requests together.

The rest is for memory that no account counts. The governor acts from here on."""

UNLIMITED_BYTES: Final = 2**62
"""A limit that is never reached."""

LEAST_BUDGET_BYTES: Final = 256 * 2**20
"""Smallest budget of requests, even if the model leaves less: its share of bodies fits two large ones."""

log = get_logger("staged_pool.memory")


class Pressure(enum.IntEnum):
    """Levels of memory use, in percent of the limit."""

    NONE = 0
    SMALLER_BATCHES = 85
    """Batches stay small, and caches are emptied. From here on, freed memory is returned to the system."""
    NO_KEEP_ALIVE = 92
    """Connections close after their response, and idle ones at once."""
    REJECT = 95
    """New requests are rejected."""


class NoRoom(ConfigError, OutOfMemory):
    """There is no memory for a model."""


class MemoryGovernor:
    """Watches the memory of this process, and reports the pressure level. For one event loop.

    Args:
        limit_bytes: Memory limit of this process. None: `Machine.limit_bytes`.
        machine: Source of the real memory use.
    """

    def __init__(self, limit_bytes: int | None = None, machine: Machine | None = None) -> None:
        self._machine = machine or Machine()
        self._configured_bytes = limit_bytes
        self.limit_bytes = limit_bytes or UNLIMITED_BYTES
        """Memory limit of this process."""
        self.budget = MemoryBudget(self.limit_bytes)
        """Budget of requests within the limit."""
        self.fullness = 0.0
        """Used fraction of the limit at the last check."""
        self.pressure = Pressure.NONE
        self._listeners: list[Callable[[Pressure], object]] = []
        self._is_busy: list[Callable[[], bool]] = []
        self._idle_checks = 0
        self._trimmed_bytes = 0
        """Resident bytes after the last trim."""
        self._left_bytes = self.limit_bytes
        """Bytes for requests by the last measurement, if nothing is loaded."""
        self._account = threading.Lock()
        self.loading_bytes = 0
        """Bytes that running loads have reserved."""

    def measure(self, reserved_bytes: int = 0) -> None:
        """Give requests the memory that everything else leaves. Reads files: call it in a thread.

        Call it once before models are loaded, to read the limit, and again each time that a model has come or gone.

        Args:
            reserved_bytes: Bytes reserved for caches.
        """
        self._find_limit()
        self._trimmed_bytes = self._machine.resident_bytes()
        if (room := self._machine.mappable_bytes()) is not None:  # it shrinks with each loaded library
            self.limit_bytes = min(self.limit_bytes, self._trimmed_bytes + room)
        taken = self._trimmed_bytes + reserved_bytes - self.budget.held_bytes
        left = int(REQUESTS_FROM * self.limit_bytes) - taken
        if left < LEAST_BUDGET_BYTES:
            log.warning("memory.little_left", limit_mb=self.limit_bytes // 10**6, taken_mb=taken // 10**6)
        self._left_bytes = left
        self._fit_budget()

    @property
    def room_bytes(self) -> int:
        """Bytes below the limit that were free at the last check, less those of loads."""
        return max(0, int((1 - self.fullness) * self.limit_bytes) - self.loading_bytes)

    @contextmanager
    def reserved(self, count: int, what: str) -> Iterator[None]:
        """Reserve memory for a load during a block, in any thread: requests have less while it runs. Reads files.

        Args:
            count: Bytes that the load takes at least.
            what: What takes them, for the message.

        Raises:
            NoRoom: The limit leaves fewer. Nothing is reserved.
        """
        with self._account:
            self._find_limit()
            self._check_room(count, what)
            self.loading_bytes += count
            self._fit_budget()
        try:
            yield
        finally:
            with self._account:
                self.loading_bytes -= count
                self._fit_budget()

    def _check_room(self, count: int, what: str) -> None:
        if not self._machine.resident_bytes():
            return  # the system does not report its memory
        fullness = self._machine.fullness(self.limit_bytes)
        room = max(0, int((1 - fullness) * self.limit_bytes) - self.loading_bytes)
        if count > room:
            raise NoRoom(
                f"{what} take {_megabytes(count)} of memory, and {_megabytes(room)} of {_megabytes(self.limit_bytes)} "
                "are left. Serve a smaller model or fewer, use a smaller dtype, or raise the memory limit of the "
                "process or of its container"
            )

    def _find_limit(self) -> None:
        if self.limit_bytes == UNLIMITED_BYTES:
            self.limit_bytes = self._configured_bytes or self._machine.limit_bytes()

    def _fit_budget(self) -> None:
        calm_bytes = max(self._left_bytes, LEAST_BUDGET_BYTES)
        limit_bytes = max(self._left_bytes - self.loading_bytes, LEAST_BUDGET_BYTES)
        self.budget.resize(limit_bytes, calm_bytes - limit_bytes)

    def rejection(self) -> Overloaded:
        """Return the error for requests under the pressure `REJECT`."""
        message = f"The server is short of memory: {self.fullness:.0%} of its limit are in use."
        return Overloaded(message, retry_after_s=RETRY_AFTER_S)

    def listen(self, listener: Callable[[Pressure], object], is_busy: Callable[[], bool]) -> Callable[[], None]:
        """Add a listener for changes of pressure.

        Args:
            listener: A function that gets the new pressure.
            is_busy: A function that returns True while there are requests. If all are idle, freed memory is returned.

        Returns:
            A function that removes the listener.
        """
        self._listeners.append(listener)
        self._is_busy.append(is_busy)

        def leave() -> None:
            self._listeners.remove(listener)
            self._is_busy.remove(is_busy)

        return leave

    async def watch(self) -> None:
        """Check at intervals, until cancelled. A check that fails for lack of memory or threads is skipped."""
        while True:
            await anyio.sleep(CHECK_INTERVAL_S)
            self.budget.serve()  # loads change it in threads
            try:
                fullness = await anyio.to_thread.run_sync(self._machine.fullness, self.limit_bytes)
                if self.update(fullness):
                    await anyio.to_thread.run_sync(self._trim)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                exhausted(error, "memory")

    def update(self, fullness: float) -> bool:
        """Update the pressure, and notify the listeners of a change.

        Args:
            fullness: Used fraction of the limit.

        Returns:
            True: freed memory should be returned to the system now.
        """
        self.fullness = fullness
        pressure = max(level for level in Pressure if 100 * fullness >= level)
        before, self.pressure = self.pressure, pressure
        if pressure != before:
            write = log.warning if pressure > before else log.info
            write("memory.pressure", used=round(fullness, 3), limit_mb=self.limit_bytes // 10**6, level=pressure.name)
            for listener in tuple(self._listeners):
                listener(pressure)
        self._idle_checks = 0 if any(is_busy() for is_busy in self._is_busy) else self._idle_checks + 1
        return pressure > Pressure.NONE or self._idle_checks == round(IDLE_S / CHECK_INTERVAL_S)

    def _trim(self) -> None:
        """Return freed memory to the system, under pressure or after enough growth."""
        if self.pressure or self._machine.resident_bytes() > self._trimmed_bytes + TRIM_GROWTH_BYTES:
            give_back_freed_memory()
            self._trimmed_bytes = self._machine.resident_bytes()


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
