"""Links: frames arrive in order, and either end may go at any time."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

import anyio
import pytest

from staged_pool.stages.link import MOST_UNREAD_BYTES, Link
from staged_pool.stages.unix_stream import UnixStream
from staged_pool.stages.wire import MOST_BYTES, Frame, FrameLimits, WireError

pytestmark = pytest.mark.anyio


def any_size(_: int) -> FrameLimits:
    return FrameLimits(MOST_BYTES, MOST_BYTES)


async def pair(take: Callable[[Frame], object]) -> tuple[Link, socket.socket]:
    """Return a link and the raw socket of its peer."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    return Link(UnixStream(ours), take, any_size), theirs


async def linked(first: Callable[[Frame], object], second: Callable[[Frame], object]) -> tuple[Link, Link]:
    ours, theirs = socket.socketpair()
    return (
        Link(UnixStream(ours), first, any_size),
        Link(UnixStream(theirs), second, any_size),
    )


async def test_frames_arrive_in_order_also_large_ones() -> None:
    got: list[Frame] = []
    left, right = await linked(lambda _: None, got.append)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(left.run)
        for number in range(200):
            left.post(number, b"head", bytes(number * 5000))
        left.close()
        assert await right.run() == "the peer closed it"
    assert [(frame.kind, len(frame.raw)) for frame in got] == [(number, number * 5000) for number in range(200)]
    assert not left.is_open
    assert not right.is_open


async def test_the_end_of_the_peer_ends_the_link_and_later_frames_are_dropped() -> None:
    link, peer = await pair(lambda _: None)
    peer.close()
    assert "the peer" in await link.run()
    link.post(1, b"too late")


@pytest.mark.parametrize("call", ["recv", "send"])
async def test_a_system_that_has_no_room_ends_the_link_and_says_so(call: str) -> None:
    class Full(socket.socket):
        pass

    def fail(*_: object) -> None:
        raise OSError(errno.ENOBUFS, "No buffer space available")

    setattr(Full, call, fail)
    ours, theirs = socket.socketpair()
    link = Link(UnixStream(Full(fileno=ours.detach())), lambda _: None, any_size)
    link.post(1, b"head")
    with anyio.fail_after(60):
        assert await link.run() == "the system has no room for it: No buffer space available"
    assert not link.is_open
    theirs.close()


async def test_a_frame_that_the_peer_has_not_finished_is_no_frame() -> None:
    got: list[Frame] = []
    link, peer = await pair(got.append)
    other = Link(_Kept(), lambda _: None, any_size)
    other.post(1, b"whole")
    other.post(2, b"cut")
    peer.send(b"".join(bytes(part) for part in other._unsent)[:-1])
    peer.close()
    assert await link.run() == "the peer ended within a frame"
    assert [frame.kind for frame in got] == [1]


async def test_a_handler_that_cannot_read_a_frame_ends_the_link() -> None:
    def refuse(frame: Frame) -> None:
        raise WireError(f"unknown kind {frame.kind}")

    left, right = await linked(lambda _: None, refuse)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(left.run)
        left.post(7, b"")
        assert await right.run() == "unknown kind 7"


class _Kept:
    """A stream that nothing is sent to."""

    async def receive(self, max_bytes: int = 0) -> bytes:
        raise anyio.EndOfStream

    async def send(self, item: bytes) -> None: ...

    async def aclose(self) -> None: ...


async def test_a_peer_that_reads_nothing_ends_the_link_beyond_a_bound() -> None:
    link, peer = await pair(lambda _: None)
    reasons: list[str] = []

    async def run() -> None:
        reasons.append(await link.run())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        while link.is_open:
            link.post(1, b"", bytes(1 << 20))
            assert link.unsent_bytes <= MOST_UNREAD_BYTES + (4 << 20), "what waits has no bound"
            await anyio.wait_all_tasks_blocked()
    peer.close()
    (reason,) = reasons
    assert "the peer reads nothing" in reason


async def test_a_peer_that_reads_slowly_gets_more_than_the_bound() -> None:
    got = 0

    def take(frame: Frame) -> None:
        nonlocal got
        got += len(frame.raw)

    left, right = await linked(lambda _: None, take)
    whole = MOST_UNREAD_BYTES + (16 << 20)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(left.run)
        for _ in range(whole >> 20):
            left.post(1, b"", bytes(1 << 20))  # all of it before the peer can have read a byte
        left.close()
        assert await right.run() == "the peer closed it"
    assert got == whole
    assert left.unsent_bytes == 0
