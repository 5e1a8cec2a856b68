"""The reader of HTTP/1.1: rejected and skipped bytes, on both paths through the server."""

from __future__ import annotations

import json

import anyio
import h11
import pytest

from staged_pool.api.http.protocol.strict_reader import MAX_EMPTY_LINES, MalformedRequest, StrictReader, check_head
from tests.servers.byte_client import EMBED, post, read_answer, statuses
from tests.servers.on_socket import serving
from tests.support.waiting import until

CLOSING = post(b'{"input": "a"}', "connection: close")
OLD = EMBED.replace(b"HTTP/1.1", b"HTTP/1.0")


pytestmark = pytest.mark.usefixtures("servers_may_import")


def read(*pieces: bytes) -> list[object]:
    """The events of what arrives in these pieces."""
    reader = StrictReader(2**16, 2**20)
    events: list[object] = []
    for piece in pieces:
        reader.receive_data(piece)
        while (event := reader.next_event()) is not h11.NEED_DATA:
            events.append(event)
    return events


def get(target: str = "/health", *lines: str, method: str = "GET", version: str = "HTTP/1.1") -> bytes:
    return "\r\n".join([f"{method} {target} {version}", "host: test", *lines, "", ""]).encode("latin-1")


def chunked(body: bytes) -> bytes:
    return post(body, "transfer-encoding: chunked")


WRONG = [
    ("a version of the future", get(version="HTTP/9.9"), 505),
    ("a minor version of the future", get(version="HTTP/1.2"), 505),
    ("a version of the past", get(version="HTTP/0.9"), 505),
    ("a version that is none", get(version="HTTP/11"), 400),
    ("a version in small letters", get(version="http/1.1"), 400),
    ("a method in small letters", get(method="get"), 501),
    ("an unknown method", get(method="BREW"), 501),
    ("a tunnel", get("test:443", method="CONNECT"), 501),
    ("a target that is no path", get("health"), 400),
    ("a target with a fragment", get("/health#a"), 400),
    ("a star that is not for OPTIONS", get("*"), 400),
    ("a URL without a host", get("http:///health"), 400),
    ("a Host with a blank", get().replace(b"host: test", b"host: a b"), 400),
    ("a Host with a path", get().replace(b"host: test", b"host: a/b"), 400),
    ("a Host with a user", get().replace(b"host: test", b"host: a@b"), 400),
    ("two names in a Host", get().replace(b"host: test", b"host: a, b"), 400),
    ("a Host whose port is none", get().replace(b"host: test", b"host: a:b"), 400),
    ("an address without its end", get().replace(b"host: test", b"host: [::1"), 400),
    ("one length, said twice", post(b"{}", "content-length: 2, 2"), 400),
    ("two lengths that are the same", post(b"{}", "content-length: 2", "content-length: 2"), 400),
    ("an empty length", post(b"{}", "content-length:"), 400),
    ("chunks and a length", post(b"2\r\n{}\r\n0\r\n\r\n", "transfer-encoding: chunked", "content-length: 2"), 400),
    ("chunks in HTTP/1.0", chunked(b"0\r\n\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"), 400),
    ("a CR in a value", get("/health", "x: a\rb"), 400),
    ("a bell in a value", get("/health", "x: a\x07b"), 400),
    ("a bare CR in a chunk's extension", chunked(b"2;a\rb\r\n{}\r\n0\r\n\r\n"), 400),
    ("a blank behind a chunk's size", chunked(b"2 \r\n{}\r\n0\r\n\r\n"), 400),
    ("a chunk without a size", chunked(b";a\r\n{}\r\n0\r\n\r\n"), 400),
    ("a chunk of 2^64 bytes", chunked(b"10000000000000000\r\n{}"), 400),
    ("a chunk that is larger than a body may be", chunked(b"FFFFFFFFFFFFFFF\r\n{}"), 413),
    ("a chunk that is longer than it says", chunked(b"1\r\n{}\r\n0\r\n\r\n"), 400),
    ("trailers that end in LF", chunked(b"2\r\n{}\r\n0\r\na: b\n\n"), 400),
    ("a last chunk that ends in LF", chunked(b"2\r\n{}\r\n0\r\n\n"), 400),
    ("a trailer without a name", chunked(b"2\r\n{}\r\n0\r\nab\r\n\r\n"), 400),
    ("too many empty lines", b"\r\n" * (MAX_EMPTY_LINES + 1) + get(), 400),
]


@pytest.mark.parametrize(("sent", "status"), [pytest.param(sent, status, id=name) for name, sent, status in WRONG])
def test_a_malformed_request_is_rejected_however_it_is_cut(sent: bytes, status: int) -> None:
    for pieces in ([sent], [sent[n : n + 1] for n in range(len(sent))]):
        with pytest.raises(h11.RemoteProtocolError) as wrong:
            read(*pieces)
        assert wrong.value.error_status_hint == status
        assert isinstance(wrong.value, MalformedRequest)


@pytest.mark.parametrize(
    "host", ["", "a", "a.b:80", "a:", "[::1]:8000", "127.0.0.1:8000", "under_score", "%2Frun%2Fa.sock", "xn--a"]
)
def test_a_host_that_clients_send_is_right(host: str) -> None:
    events = read(get().replace(b"host: test", b"host: " + host.encode()))
    assert isinstance(events[0], h11.Request)


@pytest.mark.parametrize("end", ["#", "/\x7f", "#/", "?\xff"])
def test_a_long_target_is_read_once(end: str) -> None:
    # To try every length of the host would take hours, in which nobody else is served.
    with pytest.raises(MalformedRequest, match="The target of the request is not valid"):
        check_head(get("http://" + "a" * 2**20 + end).removesuffix(b"\r\n\r\n"))


@pytest.mark.parametrize("target", ["/", "/a?b=c", "/%68ealth", "http://other/health", "//a", "/a[0]|b"])
def test_a_target_that_clients_send_is_right(target: str) -> None:
    assert isinstance(read(get(target))[0], h11.Request)


def test_chunks_are_read_however_they_are_cut() -> None:
    sent = chunked(b'5;a=b;c="d e"\r\nhello\r\n0000A ;e\r\n0123456789\r\n0\r\nx: y\r\nz:\r\n\r\n')
    for pieces in ([sent], [sent[n : n + 1] for n in range(len(sent))]):
        events = read(*pieces)
        assert b"".join(bytes(event.data) for event in events if isinstance(event, h11.Data)) == b"hello0123456789"
        assert isinstance(events[-1], h11.EndOfMessage)


@pytest.mark.parametrize("lines", range(1, MAX_EMPTY_LINES + 1))
def test_empty_lines_before_a_request_are_skipped_however_they_are_cut(lines: int) -> None:
    sent = b"\r\n" * lines + EMBED
    for pieces in ([sent], [sent[n : n + 1] for n in range(len(sent))]):
        assert isinstance(read(*pieces)[0], h11.Request)


@pytest.mark.anyio
@pytest.mark.parametrize("behind", [b"\r\n", b"\r\n\r\n", EMBED, b"GARBAGE\x00"])
@pytest.mark.parametrize("sent", [CLOSING, OLD], ids=["connection: close", "HTTP/1.0"])
async def test_what_comes_behind_the_last_request_of_a_connection_is_ignored(sent: bytes, behind: bytes) -> None:
    async with serving() as served:
        assert statuses(await served.talk(sent + behind)) == [200]


@pytest.mark.anyio
@pytest.mark.parametrize("first", [EMBED, chunked(b'e\r\n{"input": "a"}\r\n0\r\n\r\n')], ids=["fast", "general"])
async def test_an_empty_line_behind_a_request_is_no_request(first: bytes) -> None:
    async with serving() as served, await served.connect() as stream:
        for _ in range(3):
            await stream.send(first + b"\r\n")
            assert statuses(await read_answer(stream)) == [200]
            await stream.send(b"\r\n")
        await stream.send(CLOSING)
        assert statuses(await read_answer(stream)) == [200]
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()
        await until(lambda: served.server.state.connections == 0)


@pytest.mark.anyio
async def test_a_malformed_request_is_told_what_is_wrong_and_what_would_be_right() -> None:
    async with serving() as served:
        for name, sent, status in WRONG:
            head, _, body = (await served.talk(sent)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status), name
            error = json.loads(body)["error"]
            assert error["code"] == status
            assert "expected" in error["message"] or status == 413, error
        await served.assert_alive()
