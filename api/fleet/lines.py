"""Lines between fronts and the engine process: they are made, handed over, and replaced when they end."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from typing import Final, NamedTuple, Protocol, TypeVar

import anyio

from staged_pool.runtime.remote.port import RING_BYTES, Rings
from staged_pool.stages.awake import Sleep
from staged_pool.stages.log import get_logger
from staged_pool.stages.ring import open_memory
from staged_pool.stages.unix_stream import UnixStream

LOST_PAUSE_S: Final = 0.1
"""Seconds between the end of a line and the wish for another one. The supervisor mostly finds the reason by then."""

LONGEST_MISSED_PAUSE_S: Final = 1.0
"""Longest pause after a line that could not be taken. It doubles from `LOST_PAUSE_S` with each further one."""

_NUMBER_BYTES: Final = 4
"""Size of the message that carries the end of a line: its number."""

log = get_logger("staged_pool.fleet")


class Line(NamedTuple):
    """One end of a line between a front and the engine process."""

    number: int
    stream: UnixStream
    rings: Rings


class MissedLine(NamedTuple):
    """A line for whose end this process has no descriptors or no memory. Its peer finds it ended."""

    number: int
    reason: str


class Numbered(Protocol):
    """A line, as far as `take_lines` knows it."""

    @property
    def number(self) -> int: ...


L = TypeVar("L", bound=Numbered)


async def send_line(number: int, first: UnixStream, second: UnixStream) -> None:
    """Make a line between two processes, and send each its end: a socket, and two rings in opposite directions.

    A process that has ended in the meantime gets nothing, and its peer a line that ends at once. So does the peer of
    one for which the system has no room.

    Raises:
        OSError: The system has no descriptors or no memory for it.
    """
    message = number.to_bytes(_NUMBER_BYTES, "big")
    with ExitStack() as files:
        ours, theirs = socket.socketpair()
        files.callback(ours.close)
        files.callback(theirs.close)
        up, down = (_closed_after(files, open_memory(RING_BYTES)) for _ in range(2))
        for child, ends in ((first, (ours.fileno(), up, down)), (second, (theirs.fileno(), down, up))):
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await child.send_files(message, ends)


def _closed_after(files: ExitStack, descriptor: int) -> int:
    files.callback(os.close, descriptor)
    return descriptor


async def receive_line(handover: UnixStream) -> Line | MissedLine | None:
    """Wait for the end of a line from `send_line`.

    Returns:
        The end. `MissedLine`: this process has no room for it. None: the supervisor is gone.
    """
    try:
        message, files = await handover.receive_files(_NUMBER_BYTES, 3)
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return None
    number = int.from_bytes(message, "big")
    if len(files) < 3:  # the system has closed the rest, so the peer finds that the line has ended
        for each in files:
            os.close(each)
        return MissedLine(number, "this process may open no more files")
    end, written, read = files
    stream = UnixStream(socket.socket(fileno=end))
    try:
        return Line(number, stream, Rings.mapped(written, read))
    except OSError as error:
        await stream.aclose()
        return MissedLine(number, str(error.strerror))


async def take_lines(
    receive: Callable[[], Awaitable[L | MissedLine | None]],
    serve: Callable[[L], Awaitable[str]],
    lost: Callable[[int], object],
    sleep: Sleep = anyio.sleep,
) -> None:
    """Serve one line to the engine process after another, until the supervisor is gone.

    Args:
        receive: Waits for a line, as `receive_line` does.
        serve: Serves a line, and returns the reason of its end.
        lost: Tells the supervisor that the line of a number has ended: it makes another one.
        sleep: Waits for some seconds.
    """
    missed_pause_s = LOST_PAUSE_S
    while (line := await receive()) is not None:
        if isinstance(line, MissedLine):
            log.warning("line.not_taken", reason=line.reason, again_in_s=missed_pause_s)
            await sleep(missed_pause_s)
            missed_pause_s = min(LONGEST_MISSED_PAUSE_S, 2 * missed_pause_s)
        else:
            missed_pause_s = LOST_PAUSE_S
            log.warning("engine.lost", reason=await serve(line))
            await sleep(LOST_PAUSE_S)
        lost(line.number)
