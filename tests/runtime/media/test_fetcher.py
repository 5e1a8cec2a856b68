"""Images from hosts on real sockets that behave well, badly and worse."""

from __future__ import annotations

import gzip
import socket
import ssl
import tracemalloc
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.media import dns
from staged_pool.runtime.media import fetcher as fetching
from staged_pool.runtime.media.fetcher import MediaFetcher
from staged_pool.runtime.requests import Image, Video
from staged_pool.stages.errors import (
    InvalidInput,
    MediaTimedOut,
    MediaUnavailable,
    TooLarge,
    UnusableMedia,
    UrlNotAllowed,
)
from tests.runtime.media.origin import IMAGE, LOCAL, NAME, Behave, Names, answer, fetcher, origin, redirect
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

CERTIFICATE = Path(__file__).parent / f"{NAME}.pem"
MALFORMED = (
    "has a space", "has no valid host", "has a port that is not", "is longer", "has a path that is not",
)  # fmt: skip
"""URLs whose targets are unclear, and others that are read and not followed."""
CHUNKED = "transfer-encoding: chunked"


def chunks(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


async def test_an_image_comes_with_its_bytes_and_keeps_everything_else() -> None:
    async with origin() as host:
        image = Image(host.url("/"), {"size": 4}, "a cat")
        assert await fetcher().fetch(image) == Image(IMAGE, {"size": 4}, "a cat")


async def test_an_image_that_has_its_bytes_is_returned_as_it_is() -> None:
    image = Image(IMAGE)
    assert await MediaFetcher(EngineConfig()).fetch(image) is image


async def test_the_host_is_told_its_name_and_nothing_about_this_server() -> None:
    async with origin() as host:
        host.pages["/a%20b?c=d"] = answer(IMAGE, "set-cookie: a=b")
        await fetcher().fetch(Image(host.url("/a%20b?c=d#fragment")))
        await fetcher().fetch(Image(host.url("/a%20b?c=d")))
    first, second = host.requests
    assert first == second
    assert first.splitlines() == [
        "GET /a%20b?c=d HTTP/1.1",
        f"Host: {NAME}:{host.port}",
        "User-Agent: staged-pool",
        "Accept: image/*",
        "Accept-Encoding: identity",
        "Connection: close",
        "",
    ]


async def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with origin() as host:
        assert (await fetcher().fetch(Image(host.url()))).source == IMAGE


KINDS = ["image/jpeg", "IMAGE/PNG; q=1", "application/octet-stream", "text/plain", "text/html", "nonsense", None]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_comes_is_taken_whatever_type_the_host_says(kind: str | None) -> None:
    async with origin() as host:
        host.pages["/"] = answer(kind=kind)
        assert (await fetcher().fetch(Image(host.url()))).source == IMAGE


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(IMAGE)),
        ("GZIP", gzip.compress(IMAGE) + bytes(20)),
        ("x-gzip", gzip.compress(IMAGE[:100]) + gzip.compress(IMAGE[100:])),
        ("deflate", zlib.compress(IMAGE)),
        ("deflate", raw_deflate(IMAGE)),
        ("identity, gzip", gzip.compress(IMAGE)),
        ("gzip, deflate", zlib.compress(gzip.compress(IMAGE))),
        ("gzip", IMAGE),  # a host with a wrong content-encoding: the body is unchanged
        ("identity", IMAGE),
        # names that are no codings, which browsers ignore
        ("aws-chunked", IMAGE),
        ("utf-8", IMAGE),
        ("UTF-8", IMAGE),
        ("binary", IMAGE),
        ("none", IMAGE),
        ("aws-chunked, gzip", gzip.compress(IMAGE)),
        ("gzip,aws-chunked,identity", gzip.compress(IMAGE)),
    ],
)
async def test_what_a_host_compresses_unasked_is_unpacked(coding: str, body: bytes) -> None:
    async with origin() as host:
        host.pages["/"] = answer(body, f"content-encoding: {coding}")
        found = await fetcher(max_image_bytes=len(IMAGE)).fetch(Image(host.url()))
        assert found.source == IMAGE
        assert "accept-encoding: identity" in host.requests[0].lower()


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        ("201 Created", ()),
        ("202 Accepted", ()),
        ("203 Non-Authoritative Information", ()),
        ("226 IM Used", ()),
        ("206 Partial Content", (f"content-range: bytes 0-{len(IMAGE) - 1}/{len(IMAGE)}",)),
    ],
)
async def test_every_status_of_success_that_carries_the_image_gives_it(status: str, headers: tuple[str, ...]) -> None:
    async with origin() as host:
        host.pages["/"] = answer(IMAGE, *headers, status=status)
        assert (await fetcher().fetch(Image(host.url()))).source == IMAGE


async def test_a_compressed_bomb_takes_no_memory() -> None:
    bomb = gzip.compress(gzip.compress(bytes(50_000_000), 9), 9)
    assert len(bomb) < 100_000
    async with origin() as host:
        host.pages["/"] = answer(bomb, "content-encoding: gzip, gzip")
        tracemalloc.start()
        try:
            with pytest.raises(TooLarge, match="larger than this server's limit of 1000000 bytes"):
                await fetcher(max_image_bytes=1_000_000).fetch(Image(host.url()))
            assert tracemalloc.get_traced_memory()[1] < 20_000_000
        finally:
            tracemalloc.stop()


async def test_an_image_of_unknown_length_is_read_to_its_end() -> None:
    async with origin() as host:
        host.pages["/"] = answer(chunks(IMAGE, IMAGE) + b"0\r\n\r\n", CHUNKED)
        assert (await fetcher().fetch(Image(host.url()))).source == IMAGE * 2


# Where a URL may lead


async def rejection(
    url: str, names: Names | None = None, *, error: type[InvalidInput] = UrlNotAllowed, **settings: Any
) -> str:
    with pytest.raises(InvalidInput) as caught:
        await fetcher(names, **settings).fetch(Image(url))
    assert type(caught.value) is error
    assert caught.value.param == "image_url"
    return str(caught.value)


async def test_nothing_is_fetched_unless_the_settings_say_from_where() -> None:
    message = "The URL of the image leads to a host that this server does not fetch from."
    names = Names()
    nothing = "The URL of the image is not followed: this server fetches nothing; send the image itself."
    assert await rejection(f"http://{NAME}/", names, allow_media_domains=()) == nothing
    assert await rejection(f"http://{NAME}/", names, allow_media_domains=("other.example",)) == message
    assert await rejection("http://93.184.216.34/", names, allow_media_domains=("example",)) == message
    assert names.asked == []


@pytest.mark.parametrize("spelling", ["127.1", "0x7f.1", "2130706433", "0", "0177.0.0.1", "localhost"])
async def test_this_machine_is_not_asked_however_it_is_spelt(spelling: str) -> None:
    async with origin() as host:
        asked = MediaFetcher(EngineConfig(allow_media_domains=("*",)))  # it asks the real resolver
        with pytest.raises(UrlNotAllowed, match="not public"):
            await asked.fetch(Image(host.url(host=spelling)))
    assert host.connections == 0


PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "198.18.0.1", "192.0.0.9", "192.88.99.1", "::1", "::", "fe80::1", "fe80::1%lo", "fd00::1",
    "ff02::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1",
    "2002:7f00:1::", "2001:0:7f00:1::", "2001:db8::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
async def test_a_name_that_leads_to_no_public_address_is_rejected(address: str) -> None:
    message = "The URL of the image leads to an address that is not public."
    assert await rejection("http://a.example/", Names({"a.example": [address]}), allow_media_domains=("*",)) == message
    mixed = Names({"a.example": ["93.184.216.34", address]})
    assert await rejection("http://a.example/", mixed, allow_media_domains=("*",)) == message


@pytest.mark.parametrize("address", [one for one in PRIVATE if "%" not in one])
async def test_an_address_that_is_not_public_is_rejected(address: str) -> None:
    host = f"[{address}]" if ":" in address else address
    assert "does not fetch from" in await rejection(f"http://{host}:2222/", allow_media_domains=("*",))


async def test_an_address_that_the_settings_name_may_be_asked_and_no_other_like_it() -> None:
    async with origin() as host:
        only = fetcher(allow_media_domains=(LOCAL,))
        assert (await only.fetch(Image(host.url(host=LOCAL)))).source == IMAGE
        assert "does not fetch from" in await rejection(host.url(), allow_media_domains=(LOCAL,))
        assert "does not fetch from" in await rejection(host.url(host="127.0.0.2"), allow_media_domains=(LOCAL,))


async def test_what_is_dialled_is_the_address_that_was_checked() -> None:
    rebinding = Names({NAME: [LOCAL]}, later={NAME: ["10.0.0.1"]})
    async with origin() as host:
        assert (await fetcher(rebinding).fetch(Image(host.url()))).source == IMAGE
        assert rebinding.asked == [NAME]
        assert "not public" in await rejection(host.url(), rebinding)
    assert host.connections == 1


async def test_one_address_of_several_that_may_not_be_asked_is_enough_to_ask_none() -> None:
    async with origin() as host:
        assert "not public" in await rejection(host.url(), Names({NAME: [LOCAL, "10.0.0.1"]}))
    assert host.connections == 0


async def test_an_address_that_refuses_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async with origin() as host:
        names = Names({NAME: ["127.0.0.2", LOCAL]})  # nobody listens at the first
        asked = fetcher(names, allow_media_domains=(NAME, "127.0.0.2", LOCAL))
        assert (await asked.fetch(Image(host.url()))).source == IMAGE


async def test_an_address_that_does_not_answer_is_left_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns, "ADDRESS_TIMEOUT_S", 0.1)
    async with origin() as host:
        with socket.create_server(("127.0.0.2", host.port), backlog=0), ExitStack() as stack:
            for _ in range(4):  # its queue is full, and the next client has no answer
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.2", host.port))
            asked = fetcher(Names({NAME: ["127.0.0.2", LOCAL]}), allow_media_domains=(NAME, "127.0.0.2", LOCAL))
            assert (await asked.fetch(Image(host.url()))).source == IMAGE


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://images.example/a", "is not one of http, https or file"),
        ("gopher://images.example/a", "is not one of http, https or file"),
        ("data:image/png;base64,AAAA", "is not one of http, https or file"),
        ("images.example/a.png", "is not one of http, https or file"),
        ("", "is not one of http, https or file"),
        ("http://user@images.example/", "has a user name or a password, which are not allowed"),
        ("http://user:secret@images.example/", "has a user name or a password, which are not allowed"),
        ("http://images.example\r\nX-A: b/", "has a space, a control character or a backslash; write it"),
        ("http://images.example/a b", "has a space, a control character or a backslash; write it"),
        ("http://images.example\\@127.0.0.1/", "has a space, a control character or a backslash; write it"),
        ("http:///a", "has no valid host; write names in ASCII, others in their xn-- form"),
        ("http:a", "has no valid host; write names in ASCII, others in their xn-- form"),
        ("http://bücher.example/", "has no valid host; write names in ASCII, others in their xn-- form"),
        ("http://[::1/", "has no valid host"),
        ("http://[fe80::1%25lo]/", "has no valid host"),
        ("http://[::1]x/", "has no valid host"),
        ("http://images.example:0/", "has a port that is not between 1 and 65535"),
        ("http://images.example:65536/", "has a port that is not between 1 and 65535"),
        ("http://images.example:22/", "has a port that is kept for another service"),
        ("https://images.example:1023/", "has a port that is kept for another service"),
        ("http://images.example:8a/", "has no valid host; write names in ASCII"),
        ("http://images.example/" + "a" * 8192, "is longer than 8192 characters"),
        ("file:///etc/passwd", "names a file, and this server reads no files"),
    ],
)
async def test_an_invalid_url_is_rejected_and_not_repeated(url: str, why: str) -> None:
    names = Names()
    message = await rejection(url, names, error=InvalidInput if why.startswith(MALFORMED) else UrlNotAllowed)
    assert message.startswith(f"The URL of the image {why}")
    assert "secret" not in message
    assert names.asked == []


# Redirects


async def test_a_redirect_is_followed() -> None:
    async with origin() as host:
        host.pages |= {"/a/b": redirect("../c", "301 Moved"), "/c": redirect(host.url("/d"), "307 Temporary")}
        host.pages |= {"/d": redirect("/\u00e4?\u00f6"), "/%C3%A4?%C3%B6": answer()}
        assert (await fetcher().fetch(Image(host.url("/a/b")))).source == IMAGE
        assert (await fetcher().fetch(Image(host.url("/\u00e4?\u00f6")))).source == IMAGE
    assert host.connections == 5


@pytest.mark.parametrize(
    ("location", "why"),
    [
        ("http://10.0.0.1/", "does not fetch from"),
        ("http://169.254.169.254/latest", "does not fetch from"),
        ("//[::1]/", "does not fetch from"),
        ("http://inside.example/", "not public"),
        ("file:///etc/passwd", "redirects to a file"),
        ("ftp://images.example/", "is not one of http, https or file"),
        ("data:image/png;base64,AAAA", "is not one of http, https or file"),
        ("http://user@images.example/", "has a user name"),
    ],
)
async def test_a_redirect_is_checked_as_the_first_url_is(location: str, why: str) -> None:
    names = Names({NAME: [LOCAL], "inside.example": ["192.168.0.1"]})
    async with origin() as host:
        host.pages["/"] = redirect(location)
        assert why in await rejection(host.url(), names)
    assert host.connections == 1


async def test_a_redirect_to_another_name_needs_that_name_to_be_allowed() -> None:
    names = Names({NAME: [LOCAL], "other.example": [LOCAL]})
    async with origin() as host:
        host.pages["/"] = redirect(host.url("/b", host="other.example"))
        assert "does not fetch from" in await rejection(host.url(), names, allow_media_domains=(NAME, LOCAL))
    assert names.asked == [NAME]


@pytest.mark.parametrize("around", ["", " ", "\t "])
async def test_a_blank_in_the_target_of_a_redirect_is_written_as_browsers_do(around: str) -> None:
    async with origin() as host:
        host.pages |= {"/": redirect(f"{around}/a cat.png?of=my  own{around}"), "/a%20cat.png?of=my%20%20own": answer()}
        assert (await fetcher().fetch(Image(host.url()))).source == IMAGE
        host.pages["/"] = redirect(f"http://{NAME} @127.0.0.1:{host.port}/a cat.png")
        assert "has a user name or a password" in await rejection(host.url())


async def test_a_name_is_looked_up_and_checked_again_at_each_redirect() -> None:
    rebinding = Names({NAME: [LOCAL]}, later={NAME: ["10.0.0.1"]})
    async with origin() as host:
        host.pages["/"] = redirect("/again")
        assert "not public" in await rejection(host.url(), rebinding)
    assert host.connections == 1


async def test_a_host_that_redirects_in_circles_is_left() -> None:
    async with origin() as host:
        host.pages["/"] = redirect("/")
        with pytest.raises(UnusableMedia, match="redirects more than 3 times"):
            await fetcher().fetch(Image(host.url()))
    assert host.connections == 4


# TLS


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=CERTIFICATE)


def certified() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    return context


async def test_a_certificate_must_be_of_the_name_though_an_address_is_dialled() -> None:
    names = Names({NAME: [LOCAL], "other.example": [LOCAL]})
    config = EngineConfig(allow_media_domains=("*", LOCAL))
    asked = MediaFetcher(config, find=names, trust=trusting)
    async with origin(await anyio.to_thread.run_sync(certified)) as host:
        assert (await asked.fetch(Image(host.url(scheme="https")))).source == IMAGE
        assert host.requests[0].splitlines()[1] == f"Host: {NAME}:{host.port}"
        for strange in (host.url(host="other.example", scheme="https"), host.url(host=LOCAL, scheme="https")):
            with pytest.raises(MediaUnavailable):
                await asked.fetch(Image(strange))
        with pytest.raises(MediaUnavailable):  # nobody vouches for it
            await MediaFetcher(config, find=names).fetch(Image(host.url(scheme="https")))
        host.pages["/"] = redirect("http://images.example/")
        with pytest.raises(InvalidInput, match="redirects from https to http"):
            await asked.fetch(Image(host.url(scheme="https")))
    assert len(host.requests) == 2


async def test_a_connection_on_which_tls_never_comes_about_is_closed() -> None:
    async def stay_silent(stream: anyio.abc.ByteStream) -> None:
        await anyio.sleep_forever()

    asked = MediaFetcher(
        EngineConfig(allow_media_domains=("*", LOCAL), media_timeout_s=0.2), find=Names(), trust=trusting
    )
    async with await anyio.create_tcp_listener(local_host=LOCAL) as listener, anyio.create_task_group() as tasks:
        ended = anyio.Event()

        async def serve(stream: anyio.abc.SocketStream) -> None:
            async with stream:
                try:
                    while True:
                        await stream.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    ended.set()

        tasks.start_soon(listener.serve, serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        with pytest.raises(MediaTimedOut):
            await asked.fetch(Image(f"https://{NAME}:{port}/"))
        with anyio.fail_after(10):
            await ended.wait()
        tasks.cancel_scope.cancel()


# Hosts that fail


@pytest.mark.parametrize(
    ("behave", "error", "why"),
    [
        (answer(status="404 Not Found"), UnusableMedia, "answered with status 404"),
        (answer(status="410 Gone"), UnusableMedia, "answered with status 410"),
        (answer(status="401 Unauthorized"), MediaUnavailable, "answered with status 401"),
        (answer(status="403 Forbidden"), MediaUnavailable, "answered with status 403"),
        (answer(status="206 Partial Content"), UnusableMedia, "answered with status 206"),
        (answer(IMAGE, "content-range: bytes 0-1279/9999", status="206 Partial"), UnusableMedia, "status 206"),
        (answer(IMAGE, "content-range: bytes 1-1280/1281", status="206 Partial"), UnusableMedia, "status 206"),
        (answer(IMAGE, "content-range: bytes 0-1279/*", status="206 Partial"), UnusableMedia, "status 206"),
        (answer(b"", status="202 Accepted"), UnusableMedia, "answered with status 202"),
        (answer(b"", status="204 No Content"), UnusableMedia, "answered with status 204"),
        (answer(b"", status="205 Reset Content"), UnusableMedia, "answered with status 205"),
        (answer(status="304 Not Modified", body=b""), UnusableMedia, "answered with status 304"),
        (answer(status="302 Found"), UnusableMedia, "answered with status 302"),
        (answer(status="408 Request Timeout"), MediaUnavailable, "answered with status 408"),
        (answer(status="429 Too Many Requests"), MediaUnavailable, "answered with status 429"),
        (answer(status="503 Service Unavailable"), MediaUnavailable, "answered with status 503"),
        (answer(IMAGE, "content-encoding: br"), MediaUnavailable, r"sent it compressed \(br\)"),
        (answer(IMAGE, "content-encoding: gzip, gzip, gzip"), MediaUnavailable, "compressed it more than 2 times"),
        (answer(gzip.compress(IMAGE)[:-9], "content-encoding: gzip"), MediaUnavailable, "compressed, and damaged"),
        (answer(IMAGE, "content-encoding: deflate"), MediaUnavailable, "compressed, and damaged"),
        (answer(IMAGE, "content-length: 20000000000"), TooLarge, "larger than this server's limit of 2000 bytes"),
        (answer(IMAGE * 2), TooLarge, "larger than this server's limit of 2000 bytes"),
        (answer(chunks(*[IMAGE] * 9), CHUNKED), TooLarge, "larger than this server's limit of 2000 bytes"),
        (answer(IMAGE, "content-length: 1900"), MediaUnavailable, "the connection broke"),
        (answer(chunks(IMAGE), CHUNKED), MediaUnavailable, "the connection broke"),
        (answer(b"zz\r\n", CHUNKED), MediaUnavailable, "the connection broke"),
        (answer(IMAGE, "content-length: 3, 4"), MediaUnavailable, "the connection broke"),
        (answer(IMAGE, "a: " + "b" * 200_000), MediaUnavailable, "the connection broke"),
    ],
)
async def test_a_host_that_fails_is_named_by_what_it_did(behave: Behave, error: type[Exception], why: str) -> None:
    async with origin() as host:
        host.pages["/"] = behave
        with pytest.raises(error, match=why) as caught:
            await fetcher(max_image_bytes=2000).fetch(Image(host.url()))
        assert type(caught.value) is error
        assert NAME not in str(caught.value)
        await until(lambda: host.open_now == 0)


async def test_an_image_in_crumbs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "FREE_CHUNKS", 10)
    async with origin() as host:
        host.pages["/"] = answer(chunks(*[b"a"] * 30) + b"0\r\n\r\n", CHUNKED)
        with pytest.raises(MediaUnavailable, match="too many pieces"):
            await fetcher().fetch(Image(host.url()))


async def test_a_host_that_nobody_knows_or_that_does_not_listen_is_unavailable() -> None:
    with pytest.raises(MediaUnavailable, match="could not be found"):
        await fetcher().fetch(Image("http://unknown.example/"))
    with pytest.raises(MediaUnavailable, match="could not be found"):
        await fetcher(Names({NAME: []})).fetch(Image(f"http://{NAME}/"))
    config = EngineConfig(allow_media_domains=("*",))
    for odd in ("a" * 64 + ".example", "a..example", "-", "_"):
        with pytest.raises(MediaUnavailable, match="could not be found"):
            await MediaFetcher(config).fetch(Image(f"http://{odd}/"))  # it asks the real resolver
    async with await anyio.create_tcp_listener(local_host=LOCAL) as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
    with pytest.raises(MediaUnavailable, match="could not be reached"):
        await fetcher().fetch(Image(f"http://{NAME}:{port}/"))


async def test_a_host_that_drips_or_hangs_is_left_when_the_time_is_up() -> None:
    async def drip(stream: anyio.abc.ByteStream) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: 100000\r\n\r\n")
        while True:
            await stream.send(b"a")
            await anyio.sleep(0.01)

    async def hang(stream: anyio.abc.ByteStream) -> None:
        await stream.receive()

    async with origin() as host:
        for host.pages["/"] in (drip, hang):
            with pytest.raises(MediaTimedOut, match=r"did not send it within 0\.2 s"):
                await fetcher(media_timeout_s=0.2).fetch(Image(host.url()))
        await until(lambda: host.open_now == 0)


async def test_the_time_is_that_of_all_redirects_together() -> None:
    async def slowly(stream: anyio.abc.ByteStream) -> None:
        await anyio.sleep(0.15)
        await redirect("/")(stream)

    async with origin() as host:
        host.pages["/"] = slowly
        with pytest.raises(MediaTimedOut):
            await fetcher(media_timeout_s=0.4).fetch(Image(host.url()))
    assert host.connections <= 3


async def test_a_resolver_that_hangs_is_left_when_the_time_is_up() -> None:
    async def hang(host: str, port: int) -> list[str]:
        await anyio.sleep_forever()
        raise AssertionError

    config = EngineConfig(allow_media_domains=("*",), media_timeout_s=0.05)
    with pytest.raises(MediaTimedOut):
        await MediaFetcher(config, find=hang).fetch(Image("http://a.example/"))


# Many at once


async def test_no_more_fetches_run_at_once_than_the_limit_says() -> None:
    opened = anyio.Event()
    async with origin() as host, anyio.create_task_group() as tasks:

        async def wait(stream: anyio.abc.ByteStream) -> None:
            await opened.wait()
            await answer()(stream)

        host.pages["/"] = wait
        asked = fetcher(media_limit=2)
        for _ in range(5):
            tasks.start_soon(asked.fetch, Image(host.url()))
        await until(lambda: len(host.requests) == 2)
        await anyio.wait_all_tasks_blocked()
        assert host.connections == 2
        opened.set()
        await until(lambda: host.connections == 5)


async def test_a_caller_who_leaves_hangs_up_and_makes_room() -> None:
    async def hang(stream: anyio.abc.ByteStream) -> None:
        await stream.receive()

    async with origin() as host:
        asked = fetcher(media_limit=1)
        host.pages["/hang"] = hang
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(asked.fetch, Image(host.url("/hang")))
            await until(lambda: len(host.requests) == 1)
            tasks.cancel_scope.cancel()
        await until(lambda: host.open_now == 0)
        assert (await asked.fetch(Image(host.url()))).source == IMAGE


async def test_a_video_has_a_limit_of_its_own_and_errors_about_a_video() -> None:
    async with origin() as host:
        media = fetcher(max_image_bytes=5, max_video_bytes=len(IMAGE))
        found = await media.fetch(Video(host.url("/"), {"fps": 1}, "a cat"))
        assert found == Video(IMAGE, {"fps": 1}, "a cat")
        assert "Accept: video/*" in host.requests[0]
        with pytest.raises(TooLarge, match=r"^The video is larger than this server's limit of 9 bytes\.$") as caught:
            await fetcher(max_video_bytes=9).fetch(Video(host.url()))
        assert caught.value.param == "video_url"
        host.pages["/none"] = answer(status="404 Not Found")
        with pytest.raises(UnusableMedia, match=r"^The host of the video answered with status 404\.$"):
            await media.fetch(Video(host.url("/none")))
    with pytest.raises(UrlNotAllowed, match=r"^The URL of the video leads to ") as rejected:
        await media.fetch(Video("http://10.0.0.5/a.mp4"))
    assert rejected.value.param == "video_url"
    with pytest.raises(MediaUnavailable, match="The host of the video could not be reached"):
        await media.fetch(Video(host.url()))
