"""Child processes of the supervisor: their start, their orders and their end."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import anyio
from anyio.abc import Process

from staged_pool.api.fleet.control import Control
from staged_pool.stages.log import get_logger
from staged_pool.stages.unix_stream import UnixStream

FIRST_PAUSE_S: Final = 0.1
"""Pause before a process that has ended is started again; it doubles with each further end."""

LONGEST_PAUSE_S: Final = 5.0

STEADY_S: Final = 30.0
"""Seconds after whose end a process counts as steady: the next pause is the first one again."""

log = get_logger("staged_pool.fleet")


@dataclass(frozen=True, slots=True)
class Files:
    """Descriptors that a child inherits."""

    listener: int
    control: int
    handover: int


@dataclass(frozen=True, slots=True)
class Launch:
    """The way to start a child."""

    command: Sequence[str]
    listener: int
    """Descriptor of the listening socket."""
    settings: Callable[[str, Files, bool], bytes]
    """Makes the settings of a child: from its name, its files, and True if others serve.

    It reads them from its standard input.
    """


class Child:
    """One running child process.

    Args:
        name: Such as `front-1`.
        process: The process.
        control: Stream of its control line.
        handover: Stream over which it gets its lines to other children.
        handlers: Functions that take its orders, by class.
    """

    def __init__(
        self,
        name: str,
        process: Process,
        control: UnixStream,
        handover: UnixStream,
        handlers: Mapping[type[Any], Callable[[Child, Any], object]],
    ) -> None:
        self.name = name
        self.process = process
        self.handover = handover
        self.started_at = self.heard_at = time.monotonic()
        self.is_ready = False
        self.control = Control(control, {cls: self._heard(take) for cls, take in handlers.items()})

    def _heard(self, take: Callable[[Child, Any], object]) -> Callable[[Any], object]:
        def heard(order: Any) -> None:
            self.heard_at = time.monotonic()
            take(self, order)

        return heard

    @property
    def lived_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.started_at

    def kill(self) -> None:
        """End the process at once."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        """Serve its control line until it ends. Returns its exit code; negative: the number of a signal.

        If cancelled, the process is killed.
        """
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.control.run)
                code = await self.process.wait()
                tasks.cancel_scope.cancel()
            return code
        finally:
            self.kill()
            with anyio.CancelScope(shield=True):
                await self.process.wait()
                await self.handover.aclose()
                await self.process.aclose()


async def start(
    name: str,
    launch: Launch,
    handlers: Mapping[type[Any], Callable[[Child, Any], object]],
    *,
    others_serve: bool,
) -> Child:
    """Start a child process, in a session of its own: signals of a terminal go to the supervisor alone."""
    control, its_control = socket.socketpair()
    handover, its_handover = socket.socketpair()
    files = Files(launch.listener, its_control.fileno(), its_handover.fileno())
    try:
        process = await anyio.open_process(
            list(launch.command),
            stdin=-1,
            stdout=None,
            stderr=None,
            pass_fds=(files.listener, files.control, files.handover),
            start_new_session=True,
        )
    except BaseException:
        control.close()
        handover.close()
        raise
    finally:
        its_control.close()
        its_handover.close()
    child = Child(
        name,
        process,
        UnixStream(control),
        UnixStream(handover),
        handlers,
    )
    try:
        assert process.stdin is not None
        await process.stdin.send(launch.settings(name, files, others_serve))
        await process.stdin.aclose()
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        pass  # it has ended already, and `wait` tells its exit code
    log.info("process.started", child=name, pid=process.pid)
    return child
