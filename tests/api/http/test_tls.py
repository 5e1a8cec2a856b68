"""TLS with real clients, on the connection classes that stand in the place of Hypercorn's."""

from __future__ import annotations

import contextlib
import ssl
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
from tests.servers.byte_client import EMBED, Http2, post, read_answer, read_to_end, statuses
from tests.servers.certificates import Certificates
from tests.servers.on_socket import serving
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("servers_may_import")]


@pytest.mark.parametrize(("http2", "version"), [(False, "HTTP/1.1"), (True, "HTTP/2")])
async def test_a_client_gets_the_best_protocol_that_it_speaks(
    http2: bool, version: str, certificates: Certificates
) -> None:
    answers: dict[str, httpx.Response] = {}
    async with serving(certificates=certificates) as served:
        async with served.client(http2=http2) as client, anyio.create_task_group() as tasks:

            async def ask(text: str) -> None:
                answers[text] = await client.post("/v1/embeddings", json={"input": text})

            for text in ("a", "bb", "ccc" * 100):
                tasks.start_soon(ask, text)
    for text, response in answers.items():
        assert (response.http_version, response.status_code) == (version, 200)
        assert response.json()["data"][0]["embedding"] == expected(text).tolist()


async def test_a_large_body_and_a_large_answer_pass(certificates: Certificates) -> None:
    texts = ["x" * 400] * 2000
    async with serving(certificates=certificates) as served, served.client(http2=True) as client:
        response = await client.post("/v1/embeddings", json={"input": texts})
    assert [row["embedding"] for row in response.json()["data"]] == [expected(texts[0]).tolist()] * 2000


async def test_curl_agrees_on_http2(certificates: Certificates) -> None:
    async with serving(certificates=certificates) as served:
        url = f"https://127.0.0.1:{served.port}/v1/embeddings"
        command = ["curl", "-sS", "--cacert", str(certificates.roots), "-w", " %{http_version} %{http_code}", url]
        command += ["-H", "content-type: application/json", "-d", '{"input":"a"}']
        done = await anyio.run_process(command, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().endswith(" 2 200")


async def test_requests_on_one_connection_are_answered_one_after_the_other(certificates: Certificates) -> None:
    async with (
        serving(certificates=certificates) as served,
        await served.connect_tls(certificates.trusting("http/1.1")) as stream,
    ):
        await stream.send(EMBED * 3 + post(b'{"input":"a"}', "connection: close"))
        received = await read_to_end(stream)
    assert statuses(received) == [200] * 4


async def test_the_end_of_an_answer_is_not_a_cut(certificates: Certificates) -> None:
    async with (
        serving(certificates=certificates) as served,
        await served.connect_tls(certificates.trusting(), strict=True) as stream,
    ):
        await stream.send(post(b'{"input":"a"}', "connection: close"))
        assert statuses(await read_answer(stream)) == [200]
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()


async def test_http2_streams_and_resets_work_over_tls(certificates: Certificates) -> None:
    gate = Gate()
    async with serving(LetterModel(on_preprocess=gate), certificates=certificates) as served:
        async with await served.connect_tls(certificates.trusting("h2")) as stream:
            client = Http2(stream)
            await client.request(1, path=b"/v1/embeddings", body=b'{"input":"a"}')
            await gate.arrived()
            client.h2.reset_stream(1)
            await client.flush()
            await until(lambda: served.in_flight == 0)
            gate.open()
            await client.request(3, path=b"/v1/embeddings", body=b'{"input":"a"}')
            assert (await client.ends(3))[3] == "200"


async def test_a_client_that_leaves_gives_its_room_back(certificates: Certificates) -> None:
    gate = Gate()
    async with serving(LetterModel(on_preprocess=gate), certificates=certificates) as served:
        stream = await served.connect_tls(certificates.trusting("http/1.1"))
        await stream.send(EMBED)
        await gate.arrived()
        await stream.aclose()
        await until(lambda: served.in_flight == 0)
        assert served.in_flight == 0
        gate.open()


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b"\x00" * 100])
async def test_a_connection_without_tls_costs_only_itself(noise: bytes, certificates: Certificates) -> None:
    async with serving(certificates=certificates) as served:
        async with await served.connect() as stream:
            await stream.send(noise)
            await read_to_end(stream)
        async with served.client() as client:
            assert (await client.get("/health")).status_code == 200


async def test_a_handshake_that_does_not_come_ends_the_connection(certificates: Certificates) -> None:
    async with serving(certificates=certificates, head_timeout_s=0.1) as served:
        async with await served.connect() as stream:
            await read_to_end(stream)
        await until(lambda: served.server.state.connections == 0)
        assert served.server.state.connections == 0


async def test_an_idle_connection_does_not_hold_up_the_end(certificates: Certificates) -> None:
    async with serving(certificates=certificates) as served:
        stream = await served.connect_tls(certificates.trusting("http/1.1"))
        await stream.send(EMBED)
        assert statuses(await read_answer(stream)) == [200]
        await served.server.close()
        async with stream:
            await read_to_end(stream)


async def test_a_client_that_does_not_read_is_cut_off(certificates: Certificates) -> None:
    async with serving(certificates=certificates, write_timeout_s=0.2) as served:
        async with await served.connect_tls(certificates.trusting("http/1.1")) as stream:
            with contextlib.suppress(anyio.BrokenResourceError):  # the server may have closed already
                for _ in range(40):
                    await stream.send(post(b'{"prompt":"' + b"x" * 200_000 + b'"}', path="/tokenize"))
            await until(lambda: served.server.state.connections == 0)
            assert served.server.state.connections == 0


# Certificates of clients


async def test_only_clients_with_a_certificate_of_the_root_may_speak(certificates: Certificates) -> None:
    async with serving(certificates=certificates, tls_ca=certificates.roots) as served:
        async with served.client(verify=certificates.trusting(certificate=True), http2=True) as client:
            assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200
        for context in (certificates.trusting(), _foreign(certificates)):
            async with served.client(verify=context) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get("/health")
        async with served.client(verify=certificates.trusting(certificate=True)) as client:
            assert (await client.get("/health")).status_code == 200


def _foreign(certificates: Certificates) -> ssl.SSLContext:
    context = certificates.trusting()
    trustme.CA().issue_cert("stranger@test").configure_cert(context)
    return context


# Wrong files


def test_old_versions_of_tls_are_not_spoken(certificates: Certificates) -> None:
    context = server_context(ServerConfig(**certificates.settings))  # type: ignore[arg-type]
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert server_context(ServerConfig()) is None


def test_wrong_files_are_named_before_the_server_listens(certificates: Certificates, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().issue_cert("other").private_key_pem.write_to_path(other)
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    locked = tmp_path / "locked.pem"
    locked.write_bytes(_locked(certificates.settings["tls_key"]))
    for changed, words in [
        ({"tls_key": other}, "is not the key of tls_cert"),
        ({"tls_key": text}, "in PEM form"),
        ({"tls_cert": text}, "in PEM form"),
        ({"tls_cert": tmp_path / "none"}, "tls_cert=.*No such file"),
        ({"tls_ca": text}, "tls_ca=.*PEM"),
        ({"tls_key": locked}, "password"),
    ]:
        config = ServerConfig(**certificates.settings | changed)  # type: ignore[arg-type]
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
