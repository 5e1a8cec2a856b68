"""Rows 44 to 48 over HTTP and to hosts on real sockets: where the URL of an image may lead, and what a host may do."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
import pytest

from tests.chaos.harness import Attacked
from tests.chaos.images import attacked, body, rejection, settings, vectors
from tests.models.images.drawing import drawing, encode
from tests.models.tiny import build
from tests.runtime.media.origin import LOCAL, NAME, answer, origin, redirect
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

SOLE = encode(drawing(90, 70, 1))
CERTIFICATE = Path(__file__).parents[1] / "runtime" / "media" / f"{NAME}.pem"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("clip", tmp_path_factory.mktemp("models") / "clip")


@dataclass
class Resolver:
    """The machine's, which also knows the hosts of a test: each question about one may have an answer of its own."""

    table: dict[str, list[Sequence[str]]] = field(default_factory=lambda: {NAME: [[LOCAL]]})
    """The last of a host's answers is given again."""
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._real = anyio.getaddrinfo

    async def __call__(self, host: str, port: int, **more: Any) -> Any:
        self.asked.append(host)
        if host not in self.table:
            return await self._real(host, port, **more)
        await anyio.lowlevel.checkpoint()
        answers = self.table[host]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    resolver = Resolver()
    monkeypatch.setattr(anyio, "getaddrinfo", resolver)
    return resolver


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))


@asynccontextmanager
async def fetching(clip: Path, **others: Any) -> AsyncIterator[tuple[Attacked, httpx.AsyncClient]]:
    defaults: dict[str, Any] = {"allow_media_domains": ("*", LOCAL), "media_timeout_s": 10.0}
    async with attacked(settings(clip, **defaults | others)) as fire, fire.served.client() as client:
        yield fire, client


def words(logged: Sequence[Any]) -> set[str]:
    """Return the logged names of requests' errors."""
    return {event["error"] for event in logged if event["event"] == "request.finished" and "error" in event}


HERE = [
    "127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f.1", "0x7f000001", "0177.0.0.1", "017700000001", "0", "0.0.0.0",
    "localhost", "LOCALHOST", "[::1]", "[0:0:0:0:0:0:0:1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]",
    "[::127.0.0.1]", "[64:ff9b::7f00:1]", "[64:ff9b::127.0.0.1]", "[64:ff9b:1::7f00:1]", "[2002:7f00:1::]",
]  # fmt: skip
INSIDE = [
    "169.254.169.254", "[::ffff:169.254.169.254]", "[fe80::1]", "10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1",
    "[fd00::1]", "[fd00:ec2::254]", "198.18.0.1", "224.0.0.1", "255.255.255.255",
]  # fmt: skip


async def test_row_44_an_address_that_is_not_public_is_never_asked(
    clip: Path, names: Resolver, logged: list[Any]
) -> None:
    async with origin() as host, fetching(clip, allow_media_domains=("*",)) as (_, client):
        for spelling in (*HERE, *INSIDE):
            given = body(SOLE, host.url(host=spelling))
            assert rejection(await client.post("/v1/embeddings", json=given)) == (400, 1), spelling
        for port in (1, 22, 25, 1023):
            given = body(SOLE, f"http://{NAME}:{port}/")
            assert rejection(await client.post("/v1/embeddings", json=given)) == (400, 1), port
    assert words(logged) == {"url_not_allowed"}
    assert host.connections == 0
    assert NAME not in names.asked


async def test_row_45_every_redirect_is_rejected_that_would_be_as_a_url(
    clip: Path, names: Resolver, logged: list[Any]
) -> None:
    names.table["inside.example"] = [["192.168.0.1"]]
    async with (
        origin() as host,
        origin() as other,
        fetching(clip, allow_media_domains=(NAME, "inside.example", LOCAL)) as (
            _,
            client,
        ),
    ):
        leading = {
            "/private": "http://10.0.0.1/",
            "/metadata": "http://169.254.169.254/latest/meta-data/",
            "/loopback": f"http://127.1:{other.port}/",
            "/mapped": f"http://[::ffff:127.0.0.1]:{other.port}/",
            "/name": "http://inside.example/",
            "/elsewhere": "http://elsewhere.example/",
            "/port": "http://images.example:22/",
            "/file": "file:///etc/passwd",
            "/ftp": "ftp://images.example/",
            "/secret": "http://user:secret@images.example/",
        }
        host.pages |= {path: redirect(target) for path, target in leading.items()}
        for path in leading:
            asked = host.connections
            assert rejection(await client.post("/v1/embeddings", json=body(SOLE, host.url(path)))) == (400, 1), path
            assert host.connections == asked + 1, path
        assert words(logged) == {"url_not_allowed"}
        host.pages |= {f"/{hop}": redirect(f"/{hop + 1}") for hop in range(4)} | {"/4": answer(SOLE)}
        vectors(await client.post("/v1/embeddings", json=body(host.url("/1"))))
        asked = host.connections
        assert rejection(await client.post("/v1/embeddings", json=body(SOLE, host.url("/0")))) == (422, 1)
        assert host.connections == asked + 4
        assert other.connections == 0


def tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    return context


async def test_row_45_from_https_no_way_leads_to_http(clip: Path, names: Resolver, logged: list[Any]) -> None:
    async with origin(tls()) as host, origin() as clear, fetching(clip) as (_, client):
        host.pages |= {"/": answer(SOLE), "/clear": redirect(clear.url()), "/again": redirect("/")}
        clear.pages |= {"/": answer(SOLE), "/safe": redirect(host.url(scheme="https"))}
        for url in (host.url("/again", scheme="https"), clear.url("/safe")):
            vectors(await client.post("/v1/embeddings", json=body(url)))
        asked = clear.connections
        given = body(SOLE, host.url("/clear", scheme="https"))
        assert rejection(await client.post("/v1/embeddings", json=given)) == (400, 1)
        assert clear.connections == asked
    assert words(logged) == {"url_not_allowed"}


async def test_row_46_what_is_dialled_is_the_one_address_that_was_looked_up_and_checked(
    clip: Path, names: Resolver
) -> None:
    """DNS rebinding: a public address first and a private one later, or both at once."""
    async with origin(tls()) as host, fetching(clip) as (_, client):
        host.pages |= {"/": answer(SOLE), "/again": redirect("/")}
        names.table = {NAME: [[LOCAL], ["10.0.0.1"]], "mixed.example": [[LOCAL, "10.0.0.1"]]}
        vectors(await client.post("/v1/embeddings", json=body(host.url(scheme="https"))))
        assert names.asked.count(NAME) == 1
        # The certificate is of the name, and so is what the host is asked for, though an address was dialled.
        assert f"Host: {NAME}:{host.port}" in host.requests[0].splitlines()

        names.table[NAME] = [[LOCAL], ["10.0.0.1"]]
        given = body(SOLE, host.url("/again", scheme="https"))
        assert rejection(await client.post("/v1/embeddings", json=given)) == (400, 1)
        asked = host.connections
        for spelling in (NAME, "mixed.example"):
            given = body(SOLE, host.url(scheme="https", host=spelling))
            assert rejection(await client.post("/v1/embeddings", json=given)) == (400, 1), spelling
        assert host.connections == asked


async def test_row_47_anything_but_a_web_url_is_rejected_and_not_repeated(
    clip: Path, names: Resolver, logged: list[Any]
) -> None:
    wrong = {
        "file:///etc/passwd": "url_not_allowed",
        "file://localhost/etc/passwd": "url_not_allowed",
        "ftp://images.example/": "url_not_allowed",
        "gopher://images.example/_GET": "url_not_allowed",
        "dict://images.example/": "url_not_allowed",
        "javascript:alert(1)": "url_not_allowed",
        "http://user@images.example/": "url_not_allowed",
        "http://user:secret@images.example/": "url_not_allowed",
        "http://images.example/\r\nX-Secret: 1": "invalid_input",
        "http://images.example%0d%0aX-Secret: 1/": "invalid_input",
        "http://images.example\\@127.0.0.1/": "invalid_input",
        "http://images.example /": "invalid_input",
        "http:///": "invalid_input",
        "http://[::1/": "invalid_input",
        "http://images.example:99999/": "invalid_input",
    }
    async with fetching(clip) as (_, client):
        for url, word in wrong.items():
            logged.clear()
            response = await client.post("/v1/embeddings", json=body(SOLE, url))
            assert rejection(response) == (400, 1), (url, response.text)
            assert words(logged) == {word}, url
            assert "secret" not in response.text.lower()
    assert NAME not in names.asked


def misbehaving() -> dict[str, tuple[Any, int]]:
    async def nothing(stream: anyio.abc.ByteStream) -> None:
        await stream.receive()  # the client hangs up

    async def drips(stream: anyio.abc.ByteStream) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: 1000\r\n\r\n")
        while True:
            await stream.send(b"a")
            await anyio.sleep(0.01)

    async def slow_head(stream: anyio.abc.ByteStream) -> None:
        while True:
            await stream.send(b"HTTP/1.1 200 OK\r\n"[:1])
            await anyio.sleep(0.01)

    async def endless(stream: anyio.abc.ByteStream) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            await stream.send(b"10000\r\n" + bytes(0x10000) + b"\r\n")

    async def endless_head(stream: anyio.abc.ByteStream) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\n")
        while True:
            await stream.send(b"a: " + b"b" * 1000 + b"\r\n")

    return {
        "/nothing": (nothing, 504),
        "/drips": (drips, 504),
        "/slow-head": (slow_head, 504),
        "/endless": (endless, 413),
        "/endless-head": (endless_head, 502),
        "/large": (answer(b"", "content-length: 10000000000"), 413),
        "/too-long": (answer(bytes(200_000)), 413),
        "/short": (answer(SOLE, f"content-length: {len(SOLE) + 1}"), 502),
        "/lying": (answer(SOLE, "content-length: 100"), 422),  # the first hundred bytes of an image
        "/gzip": (answer(b"\x1f\x8b", "content-encoding: gzip"), 502),
        "/no-http": (answer(b"", status="what"), 502),
        "/unauthorized": (answer(status="401 Unauthorized"), 502),
        "/forbidden": (answer(status="403 Forbidden"), 502),
        "/busy": (answer(status="429 Too Many Requests"), 502),
        "/down": (answer(status="500 Internal Server Error"), 502),
        "/gone": (answer(status="404 Not Found"), 422),
        "/page": (answer(b"<html>", kind="text/html"), 415),
        "/no-image": (answer(b"a text"), 415),
    }


async def test_row_48_a_host_that_fails_costs_its_own_request_and_holds_up_no_other(
    clip: Path, names: Resolver
) -> None:
    pages = misbehaving()
    statuses: dict[str, tuple[int, int | None]] = {}
    async with (
        origin() as host,
        fetching(clip, media_timeout_s=1.0, media_limit=len(pages), max_image_bytes=100_000) as (_, client),
    ):
        host.pages |= {path: behave for path, (behave, _) in pages.items()}

        async def ask(path: str) -> None:
            statuses[path] = rejection(await client.post("/v1/embeddings", json=body(SOLE, host.url(path))))

        async with anyio.create_task_group() as tasks:
            for path in pages:
                tasks.start_soon(ask, path)
        assert statuses == {path: (status, 1) for path, (_, status) in pages.items()}
        await until(lambda: host.open_now == 0)
        host.pages["/"] = answer(SOLE)
        vectors(await client.post("/v1/embeddings", json=body(host.url("/"))))


async def test_row_48_fetches_have_a_limit_of_their_own_behind_which_nothing_else_waits(
    clip: Path, names: Resolver
) -> None:
    hung, left = 6, anyio.Event()

    async def hang(stream: anyio.abc.ByteStream) -> None:
        await left.wait()

    async with origin() as host, fetching(clip, media_limit=2) as (fire, client), anyio.create_task_group() as tasks:
        host.pages["/"] = hang
        statuses: list[int] = []

        async def ask() -> None:
            statuses.append((await client.post("/v1/embeddings", json=body(host.url()))).status_code)

        for _ in range(hung):
            tasks.start_soon(ask)
        await until(lambda: fire.served.in_flight == hung and host.open_now == 2)
        vectors(await client.post("/v1/embeddings", json=body(SOLE)))
        assert (await client.post("/v1/embeddings", json={"input": "a text"})).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (fire.served.in_flight, host.open_now, host.connections) == (hung, 2, 2)
        left.set()
    assert statuses == [502] * hung  # the host hung up
