"""The generator's own connection: all ways in which an answer may end, and what comes of broken ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio
import pytest

from staged_pool.api.bench.address import Address
from staged_pool.api.bench.connection import ENDS_BYTES, BrokenAnswer, HttpConnection, get, post, with_body
from staged_pool.stages.errors import ConfigError
from tests.api.bench.fake_server import CLOSE, FakeServer, answer, fake_server
from tests.servers.certificates import Certificates
from tests.servers.on_socket import serving

pytestmark = pytest.mark.anyio

REQUEST = get("any", "/", None)


def connection_to(server: FakeServer, *, whole: bool = True) -> HttpConnection:
    return HttpConnection(Address.of(server.url).connect, whole=whole)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabcde"
TO_THE_END = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabcde"
OLD = b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nabcde"
PLAIN = b"HTTP/1.1 200 OK\r\nX-Other: 1\r\ncontent-length:5\r\nServer-Timing: a;dur=1\r\n\r\nabcde"


@pytest.mark.parametrize(
    ("sent", "connections"),
    [(PLAIN, 1), (CHUNKED, 1), (INTERIM, 1), (TO_THE_END, 2), (OLD, 2)],
    ids=["length", "chunks", "interim", "to-the-end", "http-1.0"],
)
async def test_an_answer_is_read_to_its_end_and_the_connection_is_kept_where_it_may(
    sent: bytes, connections: int
) -> None:
    async with fake_server(lambda _: sent) as server:
        connection = connection_to(server)
        for _ in range(2):
            reply = await connection.exchange(REQUEST)
            assert (reply.status, reply.body, reply.resent) == (200, b"abcde", False)
        await connection.close()
    assert server.connections == connections


async def test_an_answer_in_single_bytes_is_the_same() -> None:
    for sent in (PLAIN, CHUNKED, INTERIM):
        async with fake_server(lambda _: CLOSE) as server:
            stream = _Slow(sent)
            connection = HttpConnection(partial(_give, stream), whole=True)
            reply = await connection.exchange(REQUEST)
            assert (reply.status, reply.body) == (200, b"abcde")
        assert server.connections == 0


async def _give(stream: anyio.abc.ByteStream) -> anyio.abc.ByteStream:
    return stream


class _Slow(anyio.abc.ByteStream):
    """A stream that gives one byte at a time."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await anyio.lowlevel.checkpoint()
        if not self._content:
            raise anyio.EndOfStream
        first, self._content = self._content[:1], self._content[1:]
        return first

    async def send(self, item: bytes) -> None:
        await anyio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()


async def test_headers_are_found_by_their_names_in_any_case() -> None:
    async with fake_server(lambda _: PLAIN) as server:
        connection = connection_to(server)
        reply = await connection.exchange(REQUEST)
        assert reply.header("server-timing") == "a;dur=1"
        assert reply.header("x-none") is None
        await connection.close()


async def test_only_the_ends_of_a_long_body_are_kept() -> None:
    body = b"first" + bytes(10 * ENDS_BYTES) + b"last"
    sent = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    async with fake_server(lambda _: sent) as server:
        connection = connection_to(server, whole=False)
        reply = await connection.exchange(REQUEST)
        await connection.close()
    assert len(reply.body) == 2 * ENDS_BYTES
    assert (reply.body[:5], reply.body[-4:]) == (b"first", b"last")


async def test_a_request_is_sent_again_if_the_server_has_closed_the_kept_connection() -> None:
    count = 0

    def answering(_: object) -> bytes:
        nonlocal count
        count += 1
        return CLOSE if count == 2 else PLAIN

    async with fake_server(answering) as server:
        connection = connection_to(server)
        assert not (await connection.exchange(REQUEST)).resent
        assert (await connection.exchange(REQUEST)).resent
        await connection.close()
    assert (server.connections, len(server.asked)) == (2, 3)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (CLOSE, "without an answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\nabc", "within an answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nabc", "more bytes"),
        (b"220 mail.example ESMTP\r\n\r\n", "no HTTP"),
        (bytes(2**16 + 1), "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nconnection: close\r\n\r\nzz\r\n", "no HTTP"),
    ],
)
async def test_a_broken_answer_is_an_error_and_the_next_request_has_a_new_connection(sent: bytes, said: str) -> None:
    answers = [sent, PLAIN]
    async with fake_server(lambda _: answers.pop(0)) as server:
        connection = connection_to(server)
        with pytest.raises(BrokenAnswer, match=said):
            await connection.exchange(REQUEST)
        assert (await connection.exchange(REQUEST)).status == 200
        await connection.close()
    assert server.connections == 2


async def test_nobody_listening_is_an_error_of_the_system(free_tcp_port: int) -> None:
    connection = HttpConnection(Address.of(f"http://127.0.0.1:{free_tcp_port}").connect)
    with pytest.raises(OSError, match="connection attempts failed"):
        await connection.exchange(REQUEST)


async def test_a_request_has_key_type_and_length() -> None:
    async with fake_server(lambda _: answer()) as server:
        connection = connection_to(server)
        await connection.exchange(with_body(post("host:1", "/x", "secret", "X-Priority: bulk"), b"{}"))
        await connection.close()
    (asked,) = server.asked
    assert (asked.method, asked.path, asked.body) == ("POST", "/x", b"{}")
    lines = asked.head.decode().split("\r\n")
    for line in ("Host: host:1", "Authorization: Bearer secret", "X-Priority: bulk", "Content-Type: application/json"):
        assert line in lines


@pytest.mark.usefixtures("servers_may_import")
async def test_tls_is_spoken_with_a_trusted_authority_only(certificates: Certificates) -> None:
    async with serving(certificates=certificates) as served:
        address = Address.of(served.url, certificates.roots)
        connection = HttpConnection(address.connect)
        for _ in range(2):
            assert (await connection.exchange(get(address.authority, "/health", None))).status == 200
        await connection.close()
        distrusting = HttpConnection(Address.of(served.url).connect)
        with pytest.raises(OSError, match="certificate verify failed"):
            await distrusting.exchange(REQUEST)


@pytest.mark.parametrize(
    ("url", "shown", "prefix"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", ""),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000", ""),
        ("http://host/v1", "http://host", ""),
        ("http://host/a/b/v1/", "http://host/a/b", "/a/b"),
        ("https://host", "https://host", ""),
        ("https://host:8443/x", "https://host:8443/x", "/x"),
        ("http://[::1]:80", "http://[::1]", ""),
    ],
)
def test_an_address_is_read(url: str, shown: str, prefix: str) -> None:
    address = Address.of(url)
    assert (str(address), address.prefix) == (shown, prefix)


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://host", "http://", "http://host:x", "http://host:70000", "http://a@host", "http://h?q",
     "http://h#f", "http://h\n", "http://ü", "http://a b"],
)  # fmt: skip
def test_a_wrong_address_is_told_with_a_right_one(url: str) -> None:
    with pytest.raises(ConfigError, match=r"such as http://127\.0\.0\.1:8000"):
        Address.of(url)


def test_certificates_must_be_readable_and_of_use(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Address.of("https://host", tmp_path / "none.pem")
    with pytest.raises(ConfigError, match="only https"):
        Address.of("http://host", tmp_path / "none.pem")
