"""Links: frames arrive in order, and either end may go at any time."""

from __future__ import annotations

import errno
import math
import socket
from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from staged_pool.stages.awake import STEP_S
from staged_pool.stages.link import MOST_UNREAD_BYTES, SEND_BYTES, UNREAD_S, Link
from staged_pool.stages.unix_stream import UnixStream
from staged_pool.stages.wire import MOST_BYTES, Frame, FrameLimits, WireError
from tests.support.waiting import until

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


class Ticks:
    """A sleep that ends when the test says so."""

    def __init__(self) -> None:
        self.sleeping = 0
        self._left = anyio.Semaphore(0)

    async def __call__(self, seconds: float) -> None:
        assert 0 < seconds < UNREAD_S
        self.sleeping += 1
        await self._left.acquire()
        self.sleeping -= 1

    async def pass_time(self) -> None:
        """Let all steps of `UNREAD_S` pass."""
        for _ in range(math.ceil(UNREAD_S / STEP_S)):
            await until(lambda: self.sleeping == 1)
            self._left.release()
            await anyio.wait_all_tasks_blocked()


async def read_some(peer: socket.socket, count: int) -> None:
    """Read at least some bytes."""
    peer.setblocking(False)
    while count > 0:
        try:
            count -= len(peer.recv(count))
        except BlockingIOError:
            await anyio.lowlevel.checkpoint()


async def test_a_burst_beyond_the_bound_ends_no_link_whose_peer_reads() -> None:
    got = 0

    def take(frame: Frame) -> None:
        nonlocal got
        got += len(frame.raw)

    left, right = await linked(lambda _: None, take)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(left.run)
        left.post(1, b"", bytes(4 << 20))
        await anyio.wait_all_tasks_blocked()  # its writer waits for the peer
        for _ in range(2):
            for _ in range(MOST_UNREAD_BYTES >> 23):
                left.post(1, b"", bytes(8 << 20))
            left.post(1, b"state")
            assert left.is_open
        left.close()
        assert await right.run() == "the peer closed it"
    assert got == 2 * MOST_UNREAD_BYTES + (4 << 20)


async def test_a_peer_that_reads_nothing_ends_the_link_once_much_waits_for_long() -> None:
    ticks, reasons = Ticks(), list[str]()
    ours, peer = socket.socketpair()
    link = Link(UnixStream(ours), lambda _: None, any_size, sleep=ticks)

    async def run() -> None:
        reasons.append(await link.run())

    async with anyio.create_task_group() as tasks:
        link.post(1, b"", bytes(MOST_UNREAD_BYTES // 2))
        tasks.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        assert ticks.sleeping == 0, "little waits, so nobody looks"
        link.post(1, b"", bytes(MOST_UNREAD_BYTES))
        with peer:
            for _ in range(3):
                await until(lambda: ticks.sleeping == 1)
                await read_some(peer, 2 * SEND_BYTES)  # at least one piece: a peer that takes some is not given up
                await ticks.pass_time()
                assert link.is_open
            await ticks.pass_time()
            await until(lambda: bool(reasons))
    assert "the peer reads nothing" in reasons[0]
    assert not link.is_open
    link.post(1, b"", bytes(1 << 20))
    assert not link._unsent, "and nothing waits for it"


async def test_a_link_is_watched_again_after_a_time_in_which_little_waited() -> None:
    ticks, got = Ticks(), 0

    def take(frame: Frame) -> None:
        nonlocal got
        got += len(frame.raw)

    ours, theirs = socket.socketpair()
    left, right = (
        Link(UnixStream(ours), lambda _: None, any_size, sleep=ticks),
        Link(UnixStream(theirs), take, any_size),
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(left.run)
        tasks.start_soon(right.run)
        for times in (1, 2):
            left.post(1, b"", bytes(MOST_UNREAD_BYTES + 1))
            await until(lambda: got == times * (MOST_UNREAD_BYTES + 1))  # noqa: B023
            assert left.is_open
            await ticks.pass_time()
            assert ticks.sleeping == 0
        left.close()


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
