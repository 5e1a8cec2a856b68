"""Streams over Unix sockets: they wait, carry files, and end, whatever happens in the same moment."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import Any

import anyio
import pytest
import sniffio

from staged_pool.stages.unix_stream import UnixStream

pytestmark = pytest.mark.anyio


def pair() -> tuple[UnixStream, socket.socket]:
    """Return a stream and the raw socket of its peer."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    return UnixStream(ours), theirs


def fill(stream: UnixStream) -> int:
    """Send bytes until the socket takes no more. Returns their number."""
    sent = 0
    try:
        while True:
            sent += stream._socket.send(bytes(1 << 16))
    except BlockingIOError:
        return sent


@pytest.fixture
async def failures(anyio_backend: Any) -> list[Any]:
    """Return the list of what fails in callbacks of the event loop from now on."""
    found: list[Any] = []
    if sniffio.current_async_library() == "asyncio":
        asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    return found


async def test_a_read_that_is_cancelled_while_bytes_arrive_loses_nothing(failures: list[Any]) -> None:
    stream, peer = pair()
    async with stream:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stream.receive)
            await anyio.wait_all_tasks_blocked()
            peer.send(b"late")
            tasks.cancel_scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert await stream.receive() == b"late"
    peer.close()
    assert not failures


async def test_a_write_that_is_cancelled_while_there_is_room_again_leaves_the_stream_usable(
    failures: list[Any],
) -> None:
    stream, peer = pair()
    async with stream:
        filled = fill(stream)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stream.send, b"never sent")
            await anyio.wait_all_tasks_blocked()
            while filled:
                filled -= len(peer.recv(1 << 20))
            tasks.cancel_scope.cancel()
        await anyio.wait_all_tasks_blocked()
        await stream.send(b"sent")
        assert peer.recv(100) == b"sent"
    peer.close()
    assert not failures


async def test_large_messages_arrive_whole_in_both_directions() -> None:
    ours, theirs = map(UnixStream, socket.socketpair())
    async with ours, theirs, anyio.create_task_group() as tasks:
        for one, other in ((ours, theirs), (theirs, ours)):
            tasks.start_soon(one.send, bytes(range(256)) * 20_000)
            tasks.start_soon(_take_whole, other, bytes(range(256)) * 20_000)


async def _take_whole(stream: UnixStream, expected: bytes) -> None:
    found = b""
    while len(found) < len(expected):
        found += await stream.receive()
    assert found == expected


async def test_files_travel_with_a_message() -> None:
    ours, theirs = map(UnixStream, socket.socketpair())
    read, write = os.pipe()
    async with ours, theirs, anyio.create_task_group() as tasks:
        tasks.start_soon(ours.send_files, b"L", (write, read))
        message, (written, taken) = await theirs.receive_files(1, 2)
        assert message == b"L"
        assert [os.fstat(file).st_ino for file in (written, taken)] == [os.fstat(file).st_ino for file in (write, read)]
        assert not any(map(os.get_inheritable, (written, taken)))
    for file in (read, write, written, taken):
        os.close(file)


async def test_files_wait_for_room_and_for_their_message() -> None:
    stream, peer = pair()
    other = UnixStream(peer)
    async with stream, other, anyio.create_task_group() as tasks:
        filled = fill(stream)
        tasks.start_soon(stream.send_files, b"L", (0,))
        await anyio.wait_all_tasks_blocked()
        while filled:
            filled -= len(await other.receive(filled))  # no more, or it might take the message without its file
        _, (file,) = await other.receive_files(1, 1)
        os.close(file)


async def test_the_ends_of_either_side_are_told_apart() -> None:
    stream, peer = pair()
    async with stream:
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()
        with pytest.raises(anyio.EndOfStream):
            await stream.receive_files(1, 1)
        await stream.send(b"unread")
        peer.close()
        with pytest.raises(anyio.BrokenResourceError):
            await stream.send(b"too late")
        with pytest.raises(anyio.BrokenResourceError):
            await stream.send_files(b"L", (0,))
    with pytest.raises(anyio.ClosedResourceError):
        await stream.receive()
    await stream.aclose()


async def test_closing_wakes_whoever_waits() -> None:
    stream, peer = pair()
    fill(stream)
    ended: list[str] = []

    async def wait(name: str, call: Any) -> None:
        try:
            await call
        except anyio.ClosedResourceError:
            ended.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, "read", stream.receive())
        tasks.start_soon(wait, "write", stream.send(b"no room"))
        await anyio.wait_all_tasks_blocked()
        await stream.aclose()
    assert sorted(ended) == ["read", "write"]
    peer.close()


class Full(socket.socket):
    """A socket for which the system has no room."""

    def _fail(self, *_: Any) -> Any:
        raise OSError(errno.ENOBUFS, "No buffer space available")

    send = recv = sendmsg = recvmsg = _fail


async def test_a_system_without_room_is_no_end_of_the_peer() -> None:
    ours, theirs = socket.socketpair()
    async with UnixStream(Full(fileno=ours.detach())) as stream:
        for call in (stream.receive(), stream.receive_files(1, 1), stream.send(b"x"), stream.send_files(b"x", [0])):
            with pytest.raises(OSError, match="No buffer space"):
                await call
    theirs.close()
