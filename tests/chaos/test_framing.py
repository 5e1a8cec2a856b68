"""Rows 1 to 19: invalid HTTP, and excessive amounts of valid HTTP."""

from __future__ import annotations

import random
import socket
import time
from contextlib import suppress
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from staged_pool.api.http.listener import bind
from tests.chaos.harness import UnderFire
from tests.servers.byte_client import EMBED, Http2, post, statuses
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

BODY = b'{"input":"a"}'
CHUNKED = "transfer-encoding: chunked"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def get(path: bytes = b"/health", *headers: bytes) -> bytes:
    return b"\r\n".join([b"GET " + path + b" HTTP/1.1", b"host: test", *headers, b"connection: close", b"", b""])


REFUSED = [
    ("01 both lengths", post(b"0\r\n\r\n", CHUNKED, "content-length: 5"), {400}),
    ("02 two lengths", post(BODY, "content-length: 13", "content-length: 12"), {400}),
    ("03 length +13", post(BODY, "content-length: +13"), {400}),
    ("03 length -1", post(BODY, "content-length: -1"), {400}),
    ("03 length 0x3", post(BODY, "content-length: 0x3"), {400}),
    ("03 length of 30 digits", post(BODY, "content-length: " + "9" * 30), {400, 413}),
    ("03 length of 5000 digits", post(BODY, "content-length: " + "9" * 5000), {400, 413}),
    ("04 identity", post(BODY, "transfer-encoding: identity"), {400, 501}),
    ("04 gzip, chunked", post(BODY, "transfer-encoding: gzip, chunked"), {400, 501}),
    ("04 xchunked", post(BODY, "transfer-encoding: xchunked"), {400, 501}),
    ("05 chunk size zz", post(b"zz\r\n" + BODY, CHUNKED), {400}),
    ("05 chunk size of 21 digits", post(b"1" * 21 + b"\r\n" + BODY, CHUNKED), {400}),
    ("05 chunk without CRLF", post(b"d\r\n" + BODY + b"xx0\r\n\r\n", CHUNKED), {400}),
    ("07 bare LF in the head", get().replace(b"\r\n", b"\n"), {400}),
    ("07 one bare LF", get(b"/health", b"x: a\ny: b"), {400}),
    ("07 obs-fold", get(b"/health", b"x: a\r\n b"), {400}),
    ("08 no Host", b"GET /health HTTP/1.1\r\n\r\n", {400}),
    ("08 two Hosts", get(b"/health", b"host: other"), {400}),
    ("08 absolute form is routed by its path, not its host", get(b"http://other/health"), {200}),
    ("09 NUL in a value", get(b"/health", b"x: a\x00b"), {400}),
    ("09 CR in a value", get(b"/health", b"x: a\rb"), {400}),
    ("09 space before the colon", get(b"/health", b"x : a"), {400}),
    ("10 20 KB in one header", get(b"/health", b"x: " + b"a" * 20_000), {431}),
    ("10 1000 headers", get(b"/health", *[b"x%d: a" % i for i in range(1000)]), {431}),
    ("11 a target of 100 KB", get(b"/" + b"a" * 100_000), {414, 431}),
    ("11 a target of 10 KB", get(b"/" + b"a" * 10_000), {414}),
    ("12 a path that is not ASCII", get("/hëalth".encode()), {400}),
    ("12 an encoded NUL", get(b"/health%00"), {404}),
    ("12 encoded dots and slash", get(b"/x/..%2fhealth"), {404}),
    ("12 dots", get(b"/x/../health"), {404}),
    ("12 an encoded slash", post(BODY, "connection: close", path="/v1%2fembeddings"), {404}),
    ("12 an encoded letter", get(b"/%68ealth"), {404}),
    ("14 expects 100 for too large a body", post(b"", "expect: 100-continue", "content-length: 99999999"), {413}),
]


@pytest.mark.parametrize(("request_", "allowed"), [pytest.param(r, a, id=name) for name, r, a in REFUSED])
async def test_rows_01_to_14_a_malformed_request_gets_one_rejection_and_reaches_no_stage(
    request_: bytes, allowed: set[int], fire: UnderFire
) -> None:
    received = await fire.talk(request_)
    assert len(statuses(received)) == 1
    assert statuses(received)[0] in allowed
    assert fire.seen == []


@pytest.mark.parametrize("end", [b"\r\n0\n\n", b"\r\n0\r\n", b"\r\n" + b"1" * 20 + b"\r\nx"])
async def test_row_05_a_chunked_body_that_does_not_end_properly_is_waited_for_until_its_time_is_over(
    end: bytes,
) -> None:
    async with UnderFire.opened(body_timeout_s=0.1) as fire:
        received = await fire.talk(post(b"d\r\n" + BODY + end, CHUNKED))
        assert statuses(received) in ([408], [400])
        assert fire.seen == []
        await fire.assert_unharmed()


@pytest.mark.parametrize(
    "chunk", [b"1\r\nx\r\n", b"1;e=%s\r\nx\r\n" % (b"y" * 30)], ids=["crumbs", "crumbs with extensions"]
)
async def test_row_06_a_body_in_crumbs_is_rejected_after_a_few_thousand_of_them(chunk: bytes, fire: UnderFire) -> None:
    started = time.process_time()
    received = await fire.talk(post(chunk * 250_000, CHUNKED))
    assert statuses(received) == [400]
    assert fire.seen == []
    assert time.process_time() - started < 10


async def test_row_06_long_chunk_extensions_are_dropped_and_not_held(fire: UnderFire) -> None:
    chunks = b"".join(b"1;%s\r\n%c\r\n" % (b"y" * 10_000, letter) for letter in BODY)
    received = await fire.talk(post(chunks + b"0\r\n\r\n", CHUNKED, "connection: close"))
    assert statuses(received) == [200]


async def test_row_13_tls_on_this_port_is_answered_400(fire: UnderFire) -> None:
    assert statuses(await fire.talk(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500) + b"\r\n\r\n")) == [
        400
    ]


async def test_row_13_a_megabyte_of_noise_ends_its_connection(fire: UnderFire) -> None:
    received = await fire.talk(random.Random(13).randbytes(2**20))
    assert statuses(received) in ([], [400], [431])  # reset before the answer was read, or not


async def test_row_15_of_fifty_requests_in_a_row_from_a_client_that_left_none_goes_on(fire: UnderFire) -> None:
    gate = fire.gate()
    async with await fire.served.connect() as stream:
        await stream.send(EMBED * 50)
        await gate.arrived()
    gate.open()
    await fire.assert_unharmed()
    assert len(fire.seen) <= 50


BAD_STREAMS: list[Any] = [
    pytest.param({"path": "/ü".encode()}, id="a path that is not ASCII"),
    pytest.param({"path": None, "method": b"CONNECT"}, id="CONNECT without a path"),
    pytest.param({"path": b"/v1/embeddings", "method": b"CONNECT", "body": BODY}, id="CONNECT with a path"),
    pytest.param({"path": b"*", "method": b"POST"}, id="POST *"),
]


@pytest.mark.parametrize("bad", BAD_STREAMS)
async def test_row_16_a_malformed_http2_stream_harms_no_other_connection(bad: dict[str, Any], fire: UnderFire) -> None:
    gate = fire.gate()
    async with await fire.served.connect() as other, await fire.served.connect() as stream:
        neighbour = Http2(other)
        await neighbour.request(1, path=b"/v1/embeddings", body=BODY)
        await gate.arrived()
        client = Http2(stream)
        await client.request(1, **bad)
        with anyio.move_on_after(0.2), suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            outcome = await client.ends(1)
            assert outcome[1] == "reset" or outcome[1].startswith("4")
        gate.open()
        assert await neighbour.ends(1) == {1: "200"}


async def drain(stream: anyio.abc.ByteReceiveStream) -> None:
    with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
        while True:
            await stream.receive()


async def test_row_17_ten_thousand_rapid_resets_run_few_handlers_and_hold_off_the_client() -> None:
    most = 0
    async with UnderFire.opened(max_http_requests=50) as fire:
        fire.gate()
        state = fire.served.server.state
        account = state.allowances.of(("127.0.0.1", 1))
        frames = Http2(None)
        wire = frames.h2.data_to_send()
        for stream_id in range(1, 20_000, 2):
            frames.h2.send_headers(
                stream_id, [(b":method", b"POST"), (b":authority", b"a"), (b":scheme", b"http"), (b":path", b"/health")]
            )
            frames.h2.reset_stream(stream_id)
        wire += frames.h2.data_to_send()
        async with await fire.served.connect() as stream, anyio.create_task_group() as tasks:
            tasks.start_soon(stream.send, wire)
            tasks.start_soon(drain, stream)
            with anyio.fail_after(30):
                while not account.owed_s:
                    most = max(most, state.requests)
                    await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert most <= 50 + 1
        await fire.assert_unharmed()


def http2_frame(kind: int, payload: bytes, *, flags: int = 0, stream_id: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + payload


HEADER_BLOCK = b"\x82\x86\x84\x41\x01a"  # GET http / with authority a
FLOODS = {
    "CONTINUATION without an end": http2_frame(1, HEADER_BLOCK, stream_id=1)
    + http2_frame(9, b"\x00\x01x\x01y", stream_id=1) * 100_000,
    "HPACK bomb": http2_frame(1, b"\x40\x01x\x7f\x80\x1e" + b"y" * 3967 + b"\xbe" * 12_000, flags=5, stream_id=1),
    "a frame larger than agreed": http2_frame(0, b"x" * 20_000, stream_id=1),
    "the beginning of a frame of 16 MiB": b"\xff" * 100,
    "DATA on a stream that never was": http2_frame(0, b"x", stream_id=7),
    "a window that overflows": http2_frame(8, b"\x7f\xff\xff\xff") * 2,
    "a stream that depends on itself": http2_frame(2, b"\x00\x00\x00\x01\x10", stream_id=1),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
async def test_row_18_an_http2_flood_ends_its_connection(flood: bytes, fire: UnderFire) -> None:
    received = await fire.talk(PREFACE + SETTINGS + flood)
    assert b"HTTP/1.1" not in received


async def send_again_and_again(stream: anyio.abc.SocketStream, data: bytes) -> None:
    with suppress(anyio.BrokenResourceError):
        while True:
            await stream.send(data)


@pytest.mark.parametrize("frame", [SETTINGS, http2_frame(6, b"12345678")], ids=["SETTINGS", "PING"])
async def test_row_18_a_client_that_floods_and_does_not_read_is_cut_off(
    frame: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staged_pool.api.limits.allowance.CLIENT_UNITS", 10**9)  # or it would be held off long before
    listener = bind("127.0.0.1", 0)
    client = socket.socket()
    for end, buffer in ((listener, socket.SO_SNDBUF), (client, socket.SO_RCVBUF)):
        end.setsockopt(socket.SOL_SOCKET, buffer, 4096)  # a thousand answers fill it, and not many thousands
    async with UnderFire.opened(listener=listener, write_timeout_s=0.2, keep_alive_s=1) as fire:
        client.connect(("127.0.0.1", fire.served.port))
        async with await anyio.abc.SocketStream.from_socket(client) as stream:
            await stream.send(PREFACE + SETTINGS)
            with anyio.fail_after(60):
                await send_again_and_again(stream, frame * 5000)
        await fire.assert_unharmed()


@pytest.mark.parametrize(
    "frame",
    [SETTINGS, http2_frame(6, b"12345678"), http2_frame(2, b"\x00\x00\x00\x00\x10", stream_id=1)],
    ids=["SETTINGS", "PING", "PRIORITY"],
)
async def test_row_18_a_client_that_floods_is_held_off(
    frame: bytes, fire: UnderFire, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A client in the same event loop may be slower than the allowance comes back: here it hardly does.
    monkeypatch.setattr("staged_pool.api.limits.allowance.CLIENT_UNITS", 100)
    monkeypatch.setattr("staged_pool.api.limits.allowance.CLIENT_UNITS_PER_S", 1)
    account = fire.served.server.state.allowances.of(("127.0.0.1", 1))
    async with await fire.served.connect() as stream, anyio.create_task_group() as tasks:
        await stream.send(PREFACE + SETTINGS)
        tasks.start_soon(send_again_and_again, stream, frame * 5000)
        tasks.start_soon(drain, stream)
        await until(lambda: account.owed_s > 0)
        tasks.cancel_scope.cancel()


async def test_row_18_http2_pings_are_answered(fire: UnderFire) -> None:
    async with await fire.served.connect() as stream:
        client = Http2(stream)
        client.h2.ping(b"12345678")
        await client.request(1, path=b"/health", method=b"GET")
        assert await client.ends(1) == {1: "200"}


@pytest.mark.parametrize("settings", [b"AAMAAABkAAQAAP__", b"!!", b""])
async def test_row_19_an_upgrade_to_http2_is_ignored_whatever_its_settings(settings: bytes, fire: UnderFire) -> None:
    upgrade = (b"upgrade: h2c", b"connection: upgrade, http2-settings", b"http2-settings: " + settings)
    received = await fire.talk(get(b"/health", *upgrade))
    assert statuses(received) == [200]


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
async def test_row_19_an_upgrade_to_a_websocket_is_ignored(version: bytes, fire: UnderFire) -> None:
    key = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="
    upgrade = (b"upgrade: websocket", b"connection: upgrade", b"sec-websocket-version: 13", key)
    received = await fire.talk(get(b"/v1/embeddings", *upgrade).replace(b"HTTP/1.1", version))
    assert statuses(received) == [405]
