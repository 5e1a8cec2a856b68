"""HTTP/3 with a real client over UDP."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import anyio
import pylsqpack
import pytest

from staged_pool.api.http.http3 import connection as http3_connection
from staged_pool.api.http.http3 import protocol as http3
from staged_pool.api.http.http3.connection import MESSAGE_ERROR
from staged_pool.api.http.http3.handshakes import RETRY_FROM
from staged_pool.api.http.protocol.request_head import scope_of
from staged_pool.api.limits.allowance import CLIENT_UNITS
from staged_pool.stages.errors import ConfigError
from tests.servers.certificates import Certificates
from tests.servers.http3_client import Http3Client, http3_client
from tests.servers.on_socket import serving
from tests.support.cards import CARD
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("servers_may_import")]

REQUEST = [(b":method", b"GET"), (b":scheme", b"https"), (b":authority", b"a"), (b":path", b"/health")]
UPLOAD = [(b":method", b"POST"), *REQUEST[1:3], (b":path", b"/v1/embeddings")]


def _section(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Compress a head without tables, and without a look at it."""
    _, section = pylsqpack.Encoder().encode(0, headers)
    return bytes(section)


def _frame(kind: int, payload: bytes) -> bytes:
    return bytes([kind]) + (0x4000 | len(payload)).to_bytes(2, "big") + payload


async def embed(client: Http3Client, text: str, **headers: bytes) -> Any:
    outcome = await client.ask(b"/v1/embeddings", json.dumps({"input": text}).encode(), **headers)
    assert outcome.status == 200
    return json.loads(outcome.body)["data"][0]["embedding"]


async def test_requests_are_answered_side_by_side(certificates: Certificates) -> None:
    answers: dict[str, Any] = {}
    async with serving(certificates=certificates, http3=True) as served, http3_client(served) as client:

        async def ask(text: str) -> None:
            answers[text] = await embed(client, text)

        async with anyio.create_task_group() as tasks:
            for text in ("a", "bb", "ccc"):
                tasks.start_soon(ask, text)
        health = await client.ask(b"/health")
    assert answers == {text: expected(text).tolist() for text in ("a", "bb", "ccc")}
    assert (health.status, set(json.loads(health.body))) == (200, {"unix"})


async def test_a_large_body_and_a_large_answer_pass(certificates: Certificates) -> None:
    texts = ["x" * 400] * 2000
    async with serving(certificates=certificates, http3=True) as served, http3_client(served) as client:
        outcome = await client.ask(b"/v1/embeddings", json.dumps({"input": texts}).encode())
    assert [row["embedding"] for row in json.loads(outcome.body)["data"]] == [expected(texts[0]).tolist()] * 2000


async def test_other_protocols_say_that_there_is_http3(certificates: Certificates) -> None:
    async with serving(certificates=certificates, http3=True) as served, served.client(http2=True) as client:
        response = await client.get("/health")
    assert response.headers["alt-svc"] == f'h3=":{served.quic_port}"; ma=3600'


async def test_keys_are_asked_for_and_limits_hold(certificates: Certificates) -> None:
    async with serving(certificates=certificates, http3=True, api_keys=("key",), body_limit_bytes=100) as served:
        async with http3_client(served) as client:
            assert (await client.ask(b"/v1/embeddings", b'{"input":"a"}')).status == 401
            assert await embed(client, "a", authorization=b"Bearer key") == expected("a").tolist()
            large = await client.ask(b"/v1/embeddings", b"x" * 101, authorization=b"Bearer key")
            assert large.status == 413


async def test_a_client_that_resets_its_stream_gives_its_room_back(certificates: Certificates) -> None:
    gate = Gate()
    async with serving(LetterModel(on_preprocess=gate), certificates=certificates, http3=True) as served:
        async with http3_client(served) as client:
            stream_id = await client.request(b"/v1/embeddings", b'{"input":"a"}')
            await gate.arrived()
            assert served.in_flight == 1
            client.quic.stop_stream(stream_id, 0x10C)
            await client.flush()
            await until(lambda: served.in_flight == 0)
            gate.open()
            assert await embed(client, "b") == expected("b").tolist()


async def test_a_client_that_leaves_gives_its_room_back(certificates: Certificates) -> None:
    gate = Gate()
    async with serving(LetterModel(on_preprocess=gate), certificates=certificates, http3=True) as served:
        async with http3_client(served) as client:
            await client.request(b"/v1/embeddings", b'{"input":"a"}')
            await gate.arrived()
        await until(lambda: served.in_flight == 0)
        gate.open()
        await until(lambda: served.server.state.connections == 0)
        assert (served.in_flight, served.server.state.connections) == (0, 0)


@pytest.mark.parametrize("path", [b"/\xff", b"", b"nothing"])
async def test_a_malformed_request_costs_only_itself(path: bytes, certificates: Certificates) -> None:
    async with serving(certificates=certificates, http3=True) as served, http3_client(served) as client:
        outcome = await client.ask(path)
        if client.ended is None:
            assert outcome.reset == MESSAGE_ERROR
            assert await embed(client, "a") == expected("a").tolist()
        async with http3_client(served) as other:
            assert await embed(other, "a") == expected("a").tolist()


async def test_noise_does_not_end_the_server(certificates: Certificates) -> None:
    async with serving(certificates=certificates, http3=True) as served:
        async with await anyio.create_connected_udp_socket("127.0.0.1", served.quic_port) as udp:
            for noise in (b"", b"x", os.urandom(1400), b"\xc0\x00\x00\x00\x01" + os.urandom(1300), b"\xff" * 1200):
                await udp.send(noise)
        async with http3_client(served) as client:
            assert await embed(client, "a") == expected("a").tolist()
        assert served.server.state.requests == 0


async def test_a_bug_in_the_protocol_ends_one_connection(
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = scope_of

    def buggy(headers: list[tuple[bytes, bytes]], **rest: Any) -> Any:
        if (b":path", b"/bug") in headers:
            raise KeyError("a bug")
        return whole(headers, **rest)

    monkeypatch.setattr(http3_connection, "scope_of", buggy)
    async with serving(certificates=certificates, http3=True) as served, http3_client(served) as other:
        async with http3_client(served) as client:
            await client.request(b"/bug")
            await until(lambda: client.ended is not None)
        assert await embed(other, "a") == expected("a").tolist()


async def test_one_connection_too_many_is_not_begun_while_the_others_work(certificates: Certificates) -> None:
    gate = Gate()
    async with serving(
        LetterModel(on_preprocess=gate), certificates=certificates, http3=True, max_connections=1
    ) as served:
        async with http3_client(served) as client:
            stream_id = await client.request(b"/v1/embeddings", b'{"input":"a"}')
            await gate.arrived()
            async with await anyio.create_connected_udp_socket("127.0.0.1", served.quic_port) as udp:
                first = Http3Client(_dialling(), udp, ("127.0.0.1", served.quic_port))
                await first.flush()
                await until(lambda: served.server.state.connections_rejected == 1)
            gate.open()
            assert (await client.outcome(stream_id)).status == 200


def _dialling() -> Any:
    from aioquic.h3.connection import H3_ALPN
    from aioquic.quic.configuration import QuicConfiguration
    from aioquic.quic.connection import QuicConnection

    quic = QuicConnection(configuration=QuicConfiguration(alpn_protocols=H3_ALPN, is_client=True))
    quic.connect(("127.0.0.1", 1), now=anyio.current_time())
    return quic


async def test_a_client_that_does_not_read_loses_its_answer(
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def narrow(settings: Any) -> None:
        settings.max_stream_data = settings.max_data = 4096

    body = json.dumps({"input": ["x"] * 2000}).encode()
    async with serving(certificates=certificates, http3=True, write_timeout_s=0.2) as served:
        async with http3_client(served, narrow) as client:
            for name in ("_write_connection_limits", "_write_stream_limits"):  # it never lets more through
                monkeypatch.setattr(client.quic, name, lambda *_, **__: None)
            outcome = await client.ask(b"/v1/embeddings", body)
            assert outcome.reset is not None
            await until(lambda: served.server.state.requests == 0)


async def test_the_end_of_the_server_ends_connections_after_their_answers(certificates: Certificates) -> None:
    gate = Gate()
    async with serving(LetterModel(on_preprocess=gate), certificates=certificates, http3=True) as served:
        async with http3_client(served) as client, http3_client(served) as idle:
            stream_id = await client.request(b"/v1/embeddings", b'{"input":"a"}')
            await gate.arrived()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(served.server.close)
                await until(lambda: served.server.registry.leaving)
                gate.open()
                assert (await client.outcome(stream_id)).status == 200
            await until(lambda: client.ended is not None and idle.ended is not None)
            assert client.ended is not None
            assert client.ended.error_code == http3_connection.NO_ERROR


def test_without_aioquic_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install staged-pool\[http3\]"):
        http3.check_installed()


# Damage that one client can do to others


async def _begin_handshakes(port: int, count: int) -> None:
    """Send `count` first datagrams, each from a port of its own, and nothing more."""
    for _ in range(count):
        async with await anyio.create_connected_udp_socket("127.0.0.1", port, local_host="127.0.0.1") as udp:
            await Http3Client(_dialling(), udp, ("127.0.0.1", port)).flush()


async def test_unfinished_handshakes_take_nothing_from_tcp_and_others_show_their_address(
    certificates: Certificates,
) -> None:
    async with serving(certificates=certificates, http3=True, max_connections=RETRY_FROM) as served:
        await _begin_handshakes(served.quic_port, RETRY_FROM - 1)
        await until(lambda: served.server.state.quic_connections == RETRY_FROM - 1)
        async with served.client(http2=True) as client:
            assert (await client.get("/health")).status_code == 200
        await _begin_handshakes(served.quic_port, 1)
        await until(lambda: served.server.state.quic_connections == RETRY_FROM)
        await _begin_handshakes(served.quic_port, 20)  # each is told to show its address, and is forgotten
        async with served.client() as client:
            assert (await client.get("/health")).status_code == 200
        assert served.server.state.quic_connections == RETRY_FROM


async def test_who_shows_its_address_gets_in_beside_unfinished_handshakes(certificates: Certificates) -> None:
    async with serving(certificates=certificates, http3=True) as served:
        await _begin_handshakes(served.quic_port, RETRY_FROM + 20)
        await until(lambda: served.server.state.quic_connections == RETRY_FROM)
        async with http3_client(served) as client:
            assert client.quic._retry_source_connection_id is not None
            assert await embed(client, "a") == expected("a").tolist()


async def test_a_handshake_that_is_not_finished_is_given_up(certificates: Certificates) -> None:
    async with serving(certificates=certificates, http3=True, head_timeout_s=0.1) as served:
        await _begin_handshakes(served.quic_port, 5)
        await until(lambda: served.server.state.quic_connections == 5)
        await until(lambda: served.server.state.quic_connections == 0)


async def test_a_client_that_pings_and_asks_nothing_does_not_stay(certificates: Certificates) -> None:
    async with (
        serving(certificates=certificates, http3=True, keep_alive_s=0.3) as served,
        http3_client(served) as client,
    ):
        while client.ended is None:
            client.quic.send_ping(1)
            await client.flush()
            await anyio.sleep(0.01)
        await until(lambda: served.server.state.quic_connections == 0)
        assert served.server.state.quic_connections == 0


async def test_where_all_connections_are_taken_the_longest_idle_one_makes_room(certificates: Certificates) -> None:
    async with (
        serving(certificates=certificates, http3=True, max_connections=1) as served,
        http3_client(served) as idle,
    ):
        async with http3_client(served) as client:
            assert await embed(client, "a") == expected("a").tolist()
            await until(lambda: idle.ended is not None)  # the datagram that says so may come behind the answer


async def test_datagrams_that_bring_nothing_are_lost_until_they_are_paid_for(
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "staged_pool.api.limits.allowance.CLIENT_UNITS_PER_S", 1e-9
    )  # or a slow machine forgives as it goes
    async with serving(certificates=certificates, http3=True) as served:
        allowances = served.server.state.allowances
        async with http3_client(served) as client:
            account = allowances.of(("127.0.0.1", 1))
            number = 0
            while number < 100 or not account.owed_s:  # the kernel loses some of them
                number = number + 1 if account.owed_s else 0
                client.quic.send_ping(number)
                await client.flush()
                await anyio.lowlevel.checkpoint()
            assert allowances._spent["127.0.0.1"][0] < CLIENT_UNITS + 100
            assert client.ended is None
            account.earn(CLIENT_UNITS)
            assert await embed(client, "a") == expected("a").tolist()


async def test_many_requests_and_a_long_upload_are_no_flood(certificates: Certificates) -> None:
    body = json.dumps({"input": ["x" * 1000] * 1500}).encode()
    model = LetterModel(replace(CARD, max_tokens=1000))
    async with serving(model, certificates=certificates, http3=True) as served, http3_client(served) as client:
        assert (await client.ask(b"/v1/embeddings", body)).status == 200
        for _ in range(200):
            assert (await client.ask(b"/health")).status == 200
        account = served.server.state.allowances.of(("127.0.0.1", 1))
        account.spend(CLIENT_UNITS // 2)
        assert not account.owed_s


MALFORMED: dict[str, list[tuple[bytes, bytes]]] = {
    "no path": [(b":method", b"GET"), (b":scheme", b"https"), (b":authority", b"a")],
    "two paths": [(b":method", b"GET"), (b":scheme", b"https"), (b":authority", b"a"), *[(b":path", b"/health")] * 2],
    "a capital in a name": [*REQUEST, (b"X-Test", b"a")],
    "a header of connections": [*REQUEST, (b"connection", b"close")],
    "a line break in a value": [*REQUEST, (b"x", b"a\r\nb: c")],
    "a content-length without a body": [*REQUEST, (b"content-length", b"13")],
    "another host": [*REQUEST, (b"host", b"other")],
    "CONNECT": [(b":method", b"CONNECT"), (b":authority", b"a")],
}


@pytest.mark.parametrize("headers", MALFORMED.values(), ids=MALFORMED)
async def test_a_malformed_head_ends_its_stream_alone(
    headers: list[tuple[bytes, bytes]],
    certificates: Certificates,
) -> None:
    async with serving(certificates=certificates, http3=True) as served, http3_client(served) as client:
        outcome = await client.send_raw(_frame(1, _section(headers)))
        assert (outcome.reset, client.ended) == (MESSAGE_ERROR, None)
        assert await embed(client, "a") == expected("a").tolist()


BROKEN = {
    "a body longer than it says": (
        lambda: _frame(1, _section([*UPLOAD, (b"content-length", b"3")])) + _frame(0, b"1234"),
        MESSAGE_ERROR,
    ),
    "no head": (lambda: b"", 0x10D),
    "a head of 16 MiB": (lambda: b"\x01" + (0x80000000 | 2**24).to_bytes(4, "big") + bytes(2**17), 0x107),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
async def test_a_malformed_stream_ends_alone(broken: Any, certificates: Certificates) -> None:
    made, code = broken
    async with serving(certificates=certificates, http3=True) as served, http3_client(served) as client:
        outcome = await client.send_raw(made())
        assert (outcome.reset, client.ended) == (code, None)
        assert await embed(client, "a") == expected("a").tolist()


async def test_heads_are_compressed_without_tables_whatever_the_client_offers(certificates: Certificates) -> None:
    async with serving(certificates=certificates, http3=True) as served, http3_client(served) as client:
        for number in range(20):
            assert (await client.ask(b"/health", x_request_id=b"%d" % number)).status == 200
        settings = client.h3.received_settings
        assert settings is not None
        assert (settings[1], settings[7]) == (0, 0)
        assert client.h3._decoder_bytes_sent <= 1  # nothing to acknowledge: no head of ours used a table
        assert served.in_flight == 0
