"""Child processes of the supervisor: their start, their orders and their end."""

from __future__ import annotations

import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import anyio
import anyio.abc

from staged_pool.api.fleet.control import Control
from staged_pool.runtime.machine.standard_files import inherited_number
from staged_pool.stages.link import Stream
from staged_pool.stages.log import get_logger
from staged_pool.stages.unix_stream import UnixStream

FIRST_PAUSE_S: Final = 0.1
"""Pause before a process that has ended is started again."""

LONGEST_PAUSE_S: Final = 5.0
"""Longest pause. It doubles with each further end of a process that never came to serve."""

log = get_logger("staged_pool.fleet")


@dataclass(frozen=True, slots=True)
class Files:
    """Descriptors that a child inherits."""

    listener: int
    control: int
    handover: int


class Process(Protocol):
    """A process of the operating system."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None:
        """End it at once. Does nothing if it has ended."""

    async def wait(self) -> int:
        """Wait for its end. Returns its exit code; negative: the number of a signal."""
        ...

    async def feed(self) -> None:
        """Send it its settings."""

    async def aclose(self) -> None:
        """Close its files, after its end."""


@dataclass(frozen=True, slots=True)
class Started:
    """A process that was started, and the lines to it."""

    process: Process
    control: Stream
    handover: Any
    """Takes the ends of lines to other children; see `Outside.send_line`."""


Start: TypeAlias = Callable[[str], Awaitable[Started]]
"""Starts the child of a name. Raises `OSError` if the system starts none."""


class Child:
    """One running child process.

    Args:
        name: Such as `front-1`.
        started: Its process, and the lines to it.
        handlers: Functions that take its orders, by class.
    """

    def __init__(
        self,
        name: str,
        started: Started,
        handlers: Mapping[type[Any], Callable[[Child, Any], object]],
    ) -> None:
        self.name = name
        self.process = started.process
        self.handover = started.handover
        self.others_serve: bool | None = None
        """True if the last order to it said that other fronts serve. None: it has not asked yet."""
        self.is_ready = False
        self.is_dismissed = False
        """True once the supervisor has ended it because the server ends: its exit code says nothing then."""
        self.silent_s = 0.0
        """Seconds that the supervisor has watched it without a sign of life."""
        self.line = 0
        """Number of its line to `joined`."""
        self.joined: Child | None = None
        """The engine process that this front has a line to."""
        self._started_at = anyio.current_time()
        self.control = Control(started.control, {cls: self._heard(take) for cls, take in handlers.items()})

    def _heard(self, take: Callable[[Child, Any], object]) -> Callable[[Any], object]:
        def heard(order: Any) -> None:
            self.silent_s = 0.0
            take(self, order)

        return heard

    @property
    def lived_s(self) -> float:
        """Seconds since its start."""
        return anyio.current_time() - self._started_at

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()

    def dismiss(self) -> None:
        """End the process at once, because the server ends."""
        self.is_dismissed = True
        self.kill()

    async def run(self) -> int:
        """Send it its settings, and serve its control line until it ends.

        If cancelled, the process is killed.

        Returns:
            Its exit code; negative: the number of a signal.
        """
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.process.feed)
                tasks.start_soon(self._serve)
                code = await self.process.wait()
                tasks.cancel_scope.cancel()
            return code
        finally:
            self.kill()
            with anyio.CancelScope(shield=True):
                await self.process.wait()
                await self.handover.aclose()
                await self.process.aclose()

    async def _serve(self) -> None:
        """Serve the control line. A child whose orders cannot be handled is killed, and no other suffers."""
        try:
            await self.control.run()
        except Exception:
            log.exception("process.misunderstood", child=self.name)
            self.kill()


@dataclass(frozen=True, slots=True)
class Launch:
    """The way to start real children.

    Each has a session of its own, so signals of a terminal go to the supervisor alone.
    """

    command: Sequence[str]
    listener: int
    """Descriptor of the listening socket."""
    settings: Callable[[str, Files], bytes]
    """Makes the settings of a child, which it reads from its standard input: from its name and its files."""

    async def __call__(self, name: str) -> Started:
        """Start a child process. It is not left behind if this is cancelled.

        Raises:
            OSError: The system has no room for it.
        """
        with ExitStack() as theirs, ExitStack() as ours:
            streams: list[UnixStream] = []
            numbers: list[int] = []
            for _ in range(2):
                own, its = socket.socketpair()
                theirs.callback(its.close)
                ours.callback(own.close)
                streams.append(UnixStream(own))
                numbers.append(inherited_number(its.fileno(), theirs))
            files = Files(inherited_number(self.listener, theirs), *numbers)
            settings = self.settings(name, files)
            process = await anyio.open_process(
                list(self.command),
                stdin=-1,
                stdout=None,
                stderr=None,
                pass_fds=(files.listener, files.control, files.handover),
                start_new_session=True,
            )
            ours.pop_all()
        return Started(_Process(process, settings), *streams)


class _Process:
    """A real process."""

    def __init__(self, process: anyio.abc.Process, settings: bytes) -> None:
        self._process = process
        self._settings = settings
        self.pid = process.pid
        self.wait = process.wait
        self.aclose = process.aclose

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    async def feed(self) -> None:
        assert self._process.stdin is not None
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # it has ended, and `wait` tells its code
            await self._process.stdin.send(self._settings)
            await self._process.stdin.aclose()
