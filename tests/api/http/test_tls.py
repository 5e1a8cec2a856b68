"""TLS with real clients, on the connection classes that stand in the place of Hypercorn's."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.streams.tls
import httpx
import pytest
import trustme

from staged_pool.api.config import ServerConfig
from staged_pool.api.http.server import Server
from staged_pool.api.http.tls import server_context
from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.errors import ConfigError
from tests.api.serving import EMBED, Http2, Served, engine_on, post, read_answer, read_to_end, serving, statuses
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("servers_may_import")]


@dataclass(frozen=True)
class Files:
    """Certificates of a root that only these tests know."""

    folder: Path
    root: trustme.CA

    @property
    def server(self) -> dict[str, Path]:
        return {"tls_cert": self.folder / "cert.pem", "tls_key": self.folder / "key.pem"}

    @property
    def roots(self) -> Path:
        return self.folder / "roots.pem"

    def trusting(self, *protocols: str, certificate: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.root.configure_trust(context)
        if certificate:
            self.root.issue_cert("client@test").configure_cert(context)
        if protocols:
            context.set_alpn_protocols(protocols)
        return context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root, folder = trustme.CA(), tmp_path_factory.mktemp("tls")
    certificate = root.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    with (folder / "cert.pem").open("wb") as chain:
        for blob in certificate.cert_chain_pems:
            chain.write(blob.bytes())
    root.cert_pem.write_to_path(folder / "roots.pem")
    return Files(folder, root)


@asynccontextmanager
async def serving_tls(files: Files, model: LetterModel | None = None, **config: Any) -> AsyncIterator[Served]:
    config |= files.server
    async with serving(engine_on(model or LetterModel()), **config) as served:
        yield served


def client_of(served: Served, context: ssl.SSLContext, **settings: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"https://127.0.0.1:{served.port}", verify=context, timeout=30, **settings)


async def connect(served: Served, context: ssl.SSLContext, *, strict: bool = False) -> anyio.streams.tls.TLSStream:
    """Connect a client that, if strict, takes an end without TLS's own for an attack."""
    return await anyio.connect_tcp(
        "127.0.0.1",
        served.port,
        ssl_context=context,
        tls_hostname="127.0.0.1",
        tls_standard_compatible=strict,
    )


@pytest.mark.parametrize(("http2", "version"), [(False, "HTTP/1.1"), (True, "HTTP/2")])
async def test_a_client_gets_the_best_protocol_that_it_speaks(http2: bool, version: str, files: Files) -> None:
    answers: dict[str, httpx.Response] = {}
    async with serving_tls(files) as served:
        async with client_of(served, files.trusting(), http2=http2) as client, anyio.create_task_group() as tasks:

            async def ask(text: str) -> None:
                answers[text] = await client.post("/v1/embeddings", json={"input": text})

            for text in ("a", "bb", "ccc" * 100):
                tasks.start_soon(ask, text)
    for text, response in answers.items():
        assert (response.http_version, response.status_code) == (version, 200)
        assert response.json()["data"][0]["embedding"] == expected(text).tolist()


async def test_a_large_body_and_a_large_answer_pass(files: Files) -> None:
    texts = ["x" * 400] * 2000
    async with serving_tls(files) as served, client_of(served, files.trusting(), http2=True) as client:
        response = await client.post("/v1/embeddings", json={"input": texts})
    assert [row["embedding"] for row in response.json()["data"]] == [expected(texts[0]).tolist()] * 2000


async def test_curl_agrees_on_http2(files: Files) -> None:
    async with serving_tls(files) as served:
        url = f"https://127.0.0.1:{served.port}/v1/embeddings"
        command = ["curl", "-sS", "--cacert", str(files.roots), "-w", " %{http_version} %{http_code}", url]
        command += ["-H", "content-type: application/json", "-d", '{"input":"a"}']
        done = await anyio.run_process(command, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().endswith(" 2 200")


async def test_requests_on_one_connection_are_answered_one_after_the_other(files: Files) -> None:
    async with serving_tls(files) as served, await connect(served, files.trusting("http/1.1")) as stream:
        await stream.send(EMBED * 3 + post(b'{"input":"a"}', "connection: close"))
        received = await read_to_end(stream)
    assert statuses(received) == [200] * 4


async def test_the_end_of_an_answer_is_not_a_cut(files: Files) -> None:
    async with serving_tls(files) as served, await connect(served, files.trusting(), strict=True) as stream:
        await stream.send(post(b'{"input":"a"}', "connection: close"))
        assert statuses(await read_answer(stream)) == [200]
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()


async def test_http2_streams_and_resets_work_over_tls(files: Files) -> None:
    gate = Gate()
    async with serving_tls(files, LetterModel(on_preprocess=gate)) as served:
        async with await connect(served, files.trusting("h2")) as stream:
            client = Http2(stream)
            await client.request(1, path=b"/v1/embeddings", body=b'{"input":"a"}')
            await gate.arrived()
            client.h2.reset_stream(1)
            await client.flush()
            await until(lambda: served.in_flight == 0)
            gate.open()
            await client.request(3, path=b"/v1/embeddings", body=b'{"input":"a"}')
            assert (await client.ends(3))[3] == "200"


async def test_a_client_that_leaves_gives_its_room_back(files: Files) -> None:
    gate = Gate()
    async with serving_tls(files, LetterModel(on_preprocess=gate)) as served:
        stream = await connect(served, files.trusting("http/1.1"))
        await stream.send(EMBED)
        await gate.arrived()
        await stream.aclose()
        await until(lambda: served.in_flight == 0)
        assert served.in_flight == 0
        gate.open()


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b"\x00" * 100])
async def test_a_connection_without_tls_costs_only_itself(noise: bytes, files: Files) -> None:
    async with serving_tls(files) as served:
        async with await served.connect() as stream:
            await stream.send(noise)
            await read_to_end(stream)
        async with client_of(served, files.trusting()) as client:
            assert (await client.get("/health")).status_code == 200


async def test_a_handshake_that_does_not_come_ends_the_connection(files: Files) -> None:
    async with serving_tls(files, head_timeout_s=0.1) as served:
        async with await served.connect() as stream:
            await read_to_end(stream)
        await until(lambda: served.server.state.connections == 0)
        assert served.server.state.connections == 0


async def test_an_idle_connection_does_not_hold_up_the_end(files: Files) -> None:
    async with serving_tls(files) as served:
        stream = await connect(served, files.trusting("http/1.1"))
        await stream.send(EMBED)
        assert statuses(await read_answer(stream)) == [200]
        await served.server.close()
        async with stream:
            await read_to_end(stream)


async def test_a_client_that_does_not_read_is_cut_off(files: Files) -> None:
    async with serving_tls(files, write_timeout_s=0.2) as served:
        async with await connect(served, files.trusting("http/1.1")) as stream:
            with contextlib.suppress(anyio.BrokenResourceError):  # the server may have closed already
                for _ in range(40):
                    await stream.send(post(b'{"prompt":"' + b"x" * 200_000 + b'"}', path="/tokenize"))
            await until(lambda: served.server.state.connections == 0)
            assert served.server.state.connections == 0


# Certificates of clients


async def test_only_clients_with_a_certificate_of_the_root_may_speak(files: Files) -> None:
    async with serving_tls(files, tls_ca=files.roots) as served:
        async with client_of(served, files.trusting(certificate=True), http2=True) as client:
            assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200
        for context in (files.trusting(), _foreign(files)):
            async with client_of(served, context) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get("/health")
        async with client_of(served, files.trusting(certificate=True)) as client:
            assert (await client.get("/health")).status_code == 200


def _foreign(files: Files) -> ssl.SSLContext:
    context = files.trusting()
    trustme.CA().issue_cert("stranger@test").configure_cert(context)
    return context


# Wrong files


def test_old_versions_of_tls_are_not_spoken(files: Files) -> None:
    context = server_context(ServerConfig(**files.server))  # type: ignore[arg-type]
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert server_context(ServerConfig()) is None


def test_wrong_files_are_named_before_the_server_listens(files: Files, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().issue_cert("other").private_key_pem.write_to_path(other)
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    locked = tmp_path / "locked.pem"
    locked.write_bytes(_locked(files.server["tls_key"]))
    for changed, words in [
        ({"tls_key": other}, "is not the key of tls_cert"),
        ({"tls_key": text}, "in PEM form"),
        ({"tls_cert": text}, "in PEM form"),
        ({"tls_cert": tmp_path / "none"}, "tls_cert=.*No such file"),
        ({"tls_ca": text}, "tls_ca=.*PEM"),
        ({"tls_key": locked}, "password"),
    ]:
        config = ServerConfig(**files.server | changed)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=words):
            Server(config, [EngineConfig()])


def _locked(path: Path) -> bytes:
    from cryptography.hazmat.primitives import serialization as forms

    key = forms.load_pem_private_key(path.read_bytes(), None)
    return key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.BestAvailableEncryption(b"secret"))


@pytest.mark.parametrize(
    "given",
    [
        {"tls_cert": Path("a")},
        {"tls_key": Path("a")},
        {"tls_ca": Path("a")},
        {"quic_port": 1},
        {"quic_port": 1, "tls_cert": Path("a"), "tls_key": Path("a"), "tls_ca": Path("a")},
        {"quic_port": 1, "tls_cert": Path("a"), "tls_key": Path("a"), "unix_socket": Path("a")},
        {"quic_port": -1, "tls_cert": Path("a"), "tls_key": Path("a")},
    ],
)
def test_settings_that_do_not_go_together_are_rejected(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**given)
