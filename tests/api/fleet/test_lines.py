"""Lines between a front and the engine process: one that ends is missed, and replaced."""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import anyio
import msgspec
import pytest

from staged_pool.api.config import ServerConfig
from staged_pool.api.fleet.control import MOST_ORDER_BYTES, Ask, Control, Listening, Lost, Others
from staged_pool.api.fleet.front import _Front
from staged_pool.api.fleet.lines import Line, MissedLine, receive_line, send_line
from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.unix_stream import UnixStream
from staged_pool.stages.wire import VERSION, frame

pytestmark = pytest.mark.anyio


async def streams() -> tuple[UnixStream, UnixStream]:
    ours, theirs = socket.socketpair()
    return UnixStream(ours), UnixStream(theirs)


async def test_a_front_whose_line_ends_asks_for_another_one_and_serves_it() -> None:
    control, of_front = await streams()
    front = _Front(ServerConfig(), [EngineConfig()], (), of_front)
    lost, heard = list[int](), anyio.Event()

    def take(order: Lost) -> None:
        lost.append(order.number)
        heard.set()

    supervisor = Control(control, {Lost: take})
    to_front, handover = await streams()
    to_engine, at_engine = await streams()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run)
        tasks.start_soon(front._control.run)
        tasks.start_soon(front._take_lines, handover)
        for number in (7, 8):
            heard = anyio.Event()
            await send_line(number, to_front, to_engine)
            line = await receive_line(at_engine)
            assert isinstance(line, Line)
            assert line.number == number
            assert await line.stream.receive(), "the front says hello"
            await line.stream.aclose()
            with anyio.fail_after(10):
                await heard.wait()
        tasks.cancel_scope.cancel()
    assert lost == [7, 8]
    for stream in (to_front, handover, to_engine, at_engine):
        await stream.aclose()


async def test_a_front_asks_whether_others_serve_and_accepts_only_when_it_knows() -> None:
    ours, theirs = await streams()
    front = _Front(ServerConfig(), [EngineConfig()], (), theirs)
    accepting, asked = front.accepting, list[bool]()

    def answer(_: Listening) -> None:
        asked.append(accepting.is_on)
        supervisor.post(Others(False))

    supervisor = Control(ours, {Listening: answer})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run)
        tasks.start_soon(front._control.run)
        with anyio.fail_after(10):
            await accepting.until_on()
        tasks.cancel_scope.cancel()
    assert asked == [False]


async def test_an_end_of_which_a_part_is_missing_is_told_by_its_number_and_the_next_one_is_taken() -> None:
    ours, theirs = await streams()
    other, unused = await streams()
    kept, passed = socket.socketpair()
    kept.setblocking(False)
    await ours.send_files((1).to_bytes(4, "big"), [passed.fileno()])  # the system has passed on one of three
    passed.close()
    await send_line(2, ours, other)
    missed, line = await receive_line(theirs), await receive_line(theirs)
    assert isinstance(missed, MissedLine)
    assert missed.number == 1
    assert kept.recv(1) == b"", "it is closed"
    kept.close()
    assert isinstance(line, Line)
    assert line.number == 2
    await line.stream.aclose()
    for stream in (ours, theirs, other, unused):
        await stream.aclose()


def open_files() -> set[int]:
    def is_open(number: int) -> bool:
        with suppress(OSError):
            os.fstat(number)
            return True
        return False

    return set(filter(is_open, range(4096)))


@contextmanager
def room_for(files: int) -> Iterator[None]:
    """Let this process open at most `files` more files for a block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    top, filled = max(open_files()), [os.dup(0)]
    while filled[-1] <= top:  # the system gives the least number that is free
        filled.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (filled[-1] + 1 + files, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in filled:
            os.close(each)


@pytest.mark.parametrize("files", range(5))
async def test_a_front_that_may_open_too_few_files_says_so_and_takes_the_next_line(files: int) -> None:
    """Files of the line are missing, or one of its memories cannot be mapped."""
    control, of_front = await streams()
    front = _Front(ServerConfig(), [EngineConfig()], (), of_front)
    lost, heard = list[int](), anyio.Event()

    def take(order: Lost) -> None:
        lost.append(order.number)
        heard.set()

    supervisor = Control(control, {Lost: take})
    to_front, handover = await streams()
    to_engine, at_engine = await streams()
    await send_line(1, to_front, to_engine)
    missed_line = await receive_line(at_engine)
    assert isinstance(missed_line, Line)
    before = open_files()
    async with anyio.create_task_group() as tasks:
        with room_for(files), anyio.fail_after(60):
            tasks.start_soon(supervisor.run)
            tasks.start_soon(front._control.run)
            tasks.start_soon(front._take_lines, handover)
            await heard.wait()
        assert lost == [1]
        assert open_files() == before, "it keeps nothing of the line"
        with pytest.raises(anyio.EndOfStream):
            await missed_line.stream.receive()
        await missed_line.stream.aclose()
        await send_line(2, to_front, to_engine)
        line = await receive_line(at_engine)
        assert isinstance(line, Line)
        with anyio.fail_after(60):
            assert await line.stream.receive(), "the front says hello"
        await line.stream.aclose()
        tasks.cancel_scope.cancel()
    for stream in (to_front, handover, to_engine, at_engine):
        await stream.aclose()


class Full(socket.socket):
    """A socket for which the system has no room."""

    def sendmsg(self, *_: Any) -> int:
        raise OSError(errno.ETOOMANYREFS, "too many references")


async def test_a_line_for_which_the_system_has_no_room_is_an_error_and_ends_at_its_peer() -> None:
    to_front, handover = await streams()
    ours, theirs = socket.socketpair()
    to_engine = UnixStream(Full(fileno=ours.detach()))
    with pytest.raises(OSError, match="too many references"):
        await send_line(1, to_front, to_engine)
    line = await receive_line(handover)
    assert isinstance(line, Line)
    with pytest.raises(anyio.EndOfStream):
        await line.stream.receive()
    for stream in (line.stream, to_front, handover, to_engine):
        await stream.aclose()
    theirs.close()


async def test_an_order_that_is_no_text_ends_the_control_line_with_its_reason() -> None:
    ours, theirs = await streams()
    order = msgspec.msgpack.encode(Ask(1, "metrics")).replace(b"metrics", b"\xff" * 7)
    async with ours:
        for part in frame(0, order):
            await ours.send(part)
        with anyio.fail_after(60):
            assert "cannot be read" in await Control(theirs, {Ask: print}).run()


@pytest.mark.parametrize(
    ("kind", "head", "raw", "says"),
    [
        (0, MOST_ORDER_BYTES + 1, 0, f"at most {MOST_ORDER_BYTES} are read"),
        (0, 10, 1, "a block of arrays of 1 bytes in a frame of kind 0; at most 0 are read"),
        (1, 10, 0, "the unknown kind 1"),
    ],
)
async def test_an_order_that_is_too_large_ends_the_control_line_before_it_is_here(
    kind: int, head: int, raw: int, says: str
) -> None:
    ours, theirs = await streams()
    async with ours:
        await ours.send(struct.pack("!BBIQ", VERSION, kind, head, raw))
        with anyio.fail_after(60):
            assert says in await Control(theirs, {}).run()
