"""The share of one party, and the view of others and of probes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from staged_pool.api.config import ServerConfig
from staged_pool.api.keys import OPEN, TENANT
from staged_pool.api.limits.request_limits import PROBE_BODY_BYTES, SMALL_BODY_BYTES, RequestLimits, party_of
from staged_pool.api.limits.server_state import ServerState
from staged_pool.stages.scheduling.tuning import TIMES_FREE
from tests.servers.byte_client import post, read_answer, statuses
from tests.servers.on_socket import Served, serving
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

ALICE = "authorization: Bearer alice"
BOB = "authorization: Bearer bob"
SHARE = 8 * 2**20
"""Bytes that all bodies may hold."""

LARGE = 2**20


pytestmark = pytest.mark.usefixtures("servers_may_import")


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected client that does not send its body is let go soon."""
    monkeypatch.setattr("staged_pool.api.http.general_path.LINGER_S", 0.05)


@asynccontextmanager
async def small_server(**config: Any) -> AsyncIterator[Served]:
    """A server for Alice and Bob, whose bodies may hold little."""
    async with serving(api_keys=("alice", "bob"), **config) as served:
        served.server.memory.budget.bodies.limit_bytes = SHARE
        yield served


def announcing(length: int, *headers: str, path: str = "/v1/embeddings") -> bytes:
    """The head of a request whose body does not come."""
    return post(b"", f"content-length: {length}", *headers, path=path)


def padded(size: int) -> bytes:
    return b'{"input": "a"}'.ljust(size)


@pytest.mark.anyio
@pytest.mark.parametrize("path", sorted(OPEN))
@pytest.mark.parametrize("framing", ["content-length: 32505856", f"content-length: {PROBE_BODY_BYTES + 1}"])
async def test_a_body_that_needs_no_key_is_a_small_one(path: str, framing: str) -> None:
    async with small_server() as served:
        assert statuses(await served.talk(post(b"", framing, path=path))) == [413]
        chunk = b"%x\r\n%s\r\n" % (PROBE_BODY_BYTES, bytes(PROBE_BODY_BYTES))
        chunked = post(chunk + b"1\r\nx\r\n0\r\n\r\n", "transfer-encoding: chunked", path=path)
        assert statuses(await served.talk(chunked)) == [413]
        small = post(bytes(PROBE_BODY_BYTES), "connection: close", path=path)
        assert statuses(await served.talk(small.replace(b"POST", b"GET", 1))) in ([200], [204])
        assert served.server.state.body_bytes == 0


@pytest.mark.anyio
@pytest.mark.parametrize("framing", ["", "connection: close"], ids=["fast path", "general path"])
async def test_who_announces_and_does_not_send_leaves_room_for_others(framing: str) -> None:
    headers = [framing] * bool(framing)
    async with small_server() as served, AsyncExitStack() as stack:
        bodies = served.server.memory.budget.bodies
        for _ in range(20):
            stream = await stack.enter_async_context(await served.connect())
            await stream.send(announcing(LARGE, ALICE, *headers))
        await until(lambda: bodies.rejected + bodies.held_bytes // LARGE >= 20)
        assert bodies.held_bytes == 7 * LARGE <= SHARE * TIMES_FREE // (TIMES_FREE + 1)
        for size in (14, SMALL_BODY_BYTES, LARGE // 2):
            async with await served.connect() as stream:
                await stream.send(post(padded(size), BOB, *headers))
                assert statuses(await read_answer(stream)) == [200]
        async with await served.connect() as stream:
            await stream.send(post(padded(100), ALICE, *headers))
            assert statuses(await read_answer(stream)) == [200]  # a small one is let in whatever she holds
            await stream.send(announcing(LARGE, ALICE, *headers))
    await until(lambda: bodies.held_bytes == 0)


@pytest.mark.anyio
async def test_a_probe_is_answered_however_much_is_held() -> None:
    gate = Gate()
    model = LetterModel(on_preprocess=gate)
    async with serving(model, max_http_requests=3) as served, AsyncExitStack() as stack:
        account = served.server.memory.budget.bodies
        account.limit_bytes = SHARE
        with account.hold("others") as others:
            for _ in range(2):
                stream = await stack.enter_async_context(await served.connect())
                await stream.send(announcing(3, path="/health"))  # a probe may be what fills it
            await until(lambda: served.server.state.requests == 2)
            others.add(SHARE)
            for request in (b"GET /health", b"GET /ready", b"GET /ping"):
                for lines in (b"", b"\r\nconnection: close"):
                    async with await served.connect() as stream:
                        await stream.send(request + b" HTTP/1.1\r\nhost: a" + lines + b"\r\n\r\n")
                        assert statuses(await read_answer(stream)) == [200]
            async with await served.connect() as stream:
                await stream.send(post(b"{}", path="/v1/models"))
                assert statuses(await read_answer(stream)) == [503]
            others.give_back()
            async with await served.connect() as stream:
                await stream.send(announcing(3, path="/health") + b"x")  # its body does not come
                assert statuses(await read_answer(stream)) == [503]
            gate.open()


@pytest.mark.anyio
async def test_a_body_that_can_never_fit_is_rejected_without_a_time_to_retry() -> None:
    async with small_server() as served:
        answer = await served.talk(announcing(SHARE + 1, ALICE))
        assert statuses(answer) == [413]
        assert b"retry-after" not in answer.lower()


@pytest.mark.anyio
async def test_a_body_that_a_load_leaves_no_room_for_may_be_sent_again() -> None:
    async with small_server() as served:
        bodies = served.server.memory.budget.bodies
        bodies.resize(SHARE // 4, 3 * SHARE // 4)
        answer = await served.talk(announcing(SHARE // 2, ALICE))
        assert statuses(answer) == [429]
        assert b"retry-after" in answer.lower()
        assert statuses(await served.talk(announcing(SHARE + 1, ALICE))) == [413]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"client": ("10.0.0.1", 1)}, {"client": ("10.0.0.1", 2)}, True),
        ({"client": ("10.0.0.1", 1)}, {"client": ("10.0.0.2", 1)}, False),
        ({"client": ("2001:db8::1", 1)}, {"client": ("2001:db8:0:0:ffff::2", 1)}, True),
        ({"client": ("2001:db8::1", 1)}, {"client": ("2001:db8:0:1::1", 1)}, False),
        ({"client": ("::ffff:10.0.0.1", 1)}, {"client": ("::ffff:10.0.0.2", 1)}, False),
        ({"client": ("fe80::1%eth0", 1)}, {"client": ("fe80::2%eth0", 1)}, True),
        ({"client": ("10.0.0.1", 1), TENANT: "a"}, {"client": ("10.0.0.2", 1), TENANT: "a"}, True),
        ({"client": ("10.0.0.1", 1), TENANT: "a"}, {"client": ("10.0.0.1", 1)}, False),
        ({"client": None}, {}, True),
    ],
)
def test_a_party_is_a_tenant_or_else_the_network_of_one_client(
    one: dict[str, object], other: dict[str, object], same: bool
) -> None:
    assert (party_of(one) == party_of(other)) is same


def test_a_party_has_seven_eighths_of_the_requests_at_most() -> None:
    limits = RequestLimits(ServerConfig(max_http_requests=80), ServerState())
    held = []
    while limits.too_many({TENANT: "a"}) is None:
        held.append(limits.hold({TENANT: "a"}).__enter__())
    assert len(held) == 70
    assert limits.too_many({TENANT: "b"}) is None
    for one in held:
        one.__exit__(None, None, None)
    assert limits.too_many({TENANT: "a"}) is None
