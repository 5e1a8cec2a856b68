"""Clients of a server that comes near its memory limit."""

from __future__ import annotations

from pathlib import Path

import anyio
import h2.events
import pytest

from staged_pool.runtime.machine.memory import Machine
from staged_pool.runtime.memory.governor import Pressure
from tests.servers.byte_client import EMBED, Http2, read_answer, statuses
from tests.servers.on_socket import Served, serving
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Figures(Machine):
    """A machine whose memory is as full as the test says."""

    full = 0.0

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))

    def fullness(self, limit_bytes: int) -> float:
        return self.full


async def fill(served: Served, full: float) -> None:
    """Have the server find its memory this full."""
    memory = served.server.memory
    if not isinstance(memory._machine, Figures):
        memory._machine = Figures()
    memory._machine.full = full
    await until(lambda: memory.fullness == full)


async def test_near_the_limit_connections_close_after_their_answer_and_idle_ones_at_once() -> None:
    async with serving() as served:
        async with await served.connect() as idle, await served.connect() as busy:
            for stream in (idle, busy):
                await stream.send(EMBED)
                assert b"connection: close" not in await read_answer(stream)
            await fill(served, 0.93)
            assert served.server.memory.pressure == Pressure.NO_KEEP_ALIVE
            with anyio.fail_after(10), pytest.raises(anyio.EndOfStream):
                await idle.receive()
        answer = await served.talk(EMBED)  # until the server closes
        assert statuses(answer) == [200]
        assert b"connection: close" in answer
        await fill(served, 0.5)
        async with await served.connect() as stream:
            await stream.send(EMBED)
            assert b"connection: close" not in await read_answer(stream)


async def test_at_the_limit_requests_are_rejected_before_their_body_is_read_and_probes_are_answered() -> None:
    async with serving() as served:
        await fill(served, 0.97)
        head, _, _ = EMBED.partition(b"\r\n\r\n")
        rejected = await served.talk(head.replace(b"content-length: 14", b"content-length: 9000") + b"\r\n\r\n")
        assert statuses(rejected) == [429]
        assert b"short of memory: 97% of its limit are in use" in rejected
        assert b"retry-after: 1" in rejected
        async with served.client() as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 429
        await fill(served, 0.5)
        await served.assert_alive()


async def test_http2_says_goodbye_when_memory_is_short() -> None:
    async with serving() as served, await served.connect() as stream:
        client = Http2(stream)
        await client.flush()
        await client.request(1, path=b"/health", method=b"GET")
        assert await client.ends(1) == {1: "200"}
        await fill(served, 0.93)
        with anyio.fail_after(10):
            events = client.h2.receive_data(await stream.receive())
            assert any(isinstance(event, h2.events.ConnectionTerminated) for event in events)
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
