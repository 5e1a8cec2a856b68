"""The whole server on real sockets: its answers, and misbehaving clients."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import numpy as np
import pytest
import trio
import uvloop

from staged_pool.api.http.listener import bind
from staged_pool.api.http.server import Server
from staged_pool.api.limits.server_state import ServerState
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine_stages import EngineStages
from staged_pool.stages.errors import ConfigError, DeviceLost
from tests.needed import needs
from tests.servers.byte_client import EMBED, Http2, post, read_answer, read_to_end, statuses
from tests.servers.on_socket import Served, server_on, serving
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.user_code import BAD_ENDS, BadEnd, stray_cancellation
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("servers_may_import")]


# Answers


async def test_a_real_model_answers_with_the_vectors_of_its_engine(tiny_folder: Path) -> None:
    texts = ["a query", "a somewhat longer passage", ""]
    config = EngineConfig(model=str(tiny_folder), dtype="float32")
    async with serving(config) as served, served.client() as client:
        direct = await served.engine.embed(texts)
        floats = await client.post("/v1/embeddings", json={"input": texts})
        encoded = await client.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"})
        tokens = [(await client.post("/tokenize", json={"prompt": text})).json()["tokens"] for text in texts]
        from_ids = await client.post("/v1/embeddings", json={"input": tokens})
        short = await client.post("/v1/embeddings", json={"input": texts[1], "truncate_prompt_tokens": 3})
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
    for response in (floats, from_ids):
        vectors = [row["embedding"] for row in response.json()["data"]]
        np.testing.assert_allclose(vectors, direct.embeddings, atol=1e-6)
    decoded = [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in encoded.json()["data"]]
    np.testing.assert_allclose(decoded, direct.embeddings, atol=1e-6)
    assert floats.json()["usage"]["prompt_tokens"] == direct.usage.prompt_tokens == sum(map(len, tokens))
    assert short.json()["usage"]["prompt_tokens"] == 3
    assert floats.json()["model"] == model == tiny_folder.name


BAD = [
    (b"", 400, "not valid JSON"),
    (b"[]", 400, "Expected `object`"),
    (b'{"input":[]}', 400, "at least one prompt"),
    (b'{"input":"\xff"}', 400, "not UTF-8"),
    (b'{"input":"a","model":"b"}', 404, "The model `b` does not exist."),
    (b'{"input":"a","dimensions":100000}', 400, "dimensions"),
    (b'{"input":"word ' + b"word " * 200 + b'"}', 400, "tokens"),
    (b'{"input":[1000000000]}', 400, "out of vocabulary"),
    (b'{"input":[' + b"9" * 40 + b"]}", 400, "out of vocabulary"),
    (b'{"input":"a","truncate_prompt_tokens":100000}', 400, "truncate_prompt_tokens"),
]
"""Bodies, with the status and a part of the message of the rejection."""


async def test_a_bad_request_is_rejected_by_a_real_model_and_harms_nothing(tiny_folder: Path) -> None:
    async with serving(EngineConfig(model=str(tiny_folder))) as served, served.client() as client:
        for body, status, message in BAD:
            response = await client.post("/v1/embeddings", content=body, headers={"content-type": "application/json"})
            await served.assert_alive()
            assert response.status_code == status, body
            assert message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "run",
    [lambda host: asyncio.run(host()), lambda host: uvloop.run(host()), trio.run],
    ids=["asyncio", "uvloop", "trio"],
)
def test_its_host_need_not_have_begun_the_loop_with_anyio(run: Callable[[Callable[[], Awaitable[None]]], None]) -> None:
    async def host() -> None:
        async with serving() as served, await served.connect() as stream:
            await stream.send(EMBED)
            assert statuses(await read_answer(stream)) == [200]

    run(host)


async def test_http2_answers_like_http1() -> None:
    answers: dict[str, httpx.Response] = {}

    async def ask(client: httpx.AsyncClient, text: str) -> None:
        answers[text] = await client.post("/v1/embeddings", json={"input": text})

    async with serving() as served, served.client(http1=False, http2=True) as client:
        async with anyio.create_task_group() as tasks:
            for text in ("a", "bb", "ccc"):
                tasks.start_soon(ask, client, text)
    for text, response in answers.items():
        assert (response.http_version, response.status_code) == ("HTTP/2", 200)
        assert response.json()["data"][0]["embedding"] == expected(text).tolist()


# Misbehaving clients


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (post(b"", "content-length: 1000"), 413),
        (post(b"20\r\n" + b"x" * 32 + b"\r\n" + b"20\r\n" + b"x" * 32, "transfer-encoding: chunked"), 413),
        (post(b"0\r\n\r\n", "transfer-encoding: chunked", "content-length: 5"), 400),
        (post(b"half", "content-length: 9"), 408),
        (post(b"x" * 10, "content-encoding: compress"), 415),
        (post(b"{}", "x-large: " + "y" * 15_000, "x-larger: " + "y" * 2_000), 431),
    ],
)
async def test_a_rejected_connection_is_answered_and_closed(
    request_: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staged_pool.api.http.general_path.LINGER_S", 0.05)
    async with serving(body_limit_bytes=50, body_timeout_s=0.1) as served:
        received = await served.talk(request_)
        await served.assert_alive()
    head, _, body = received.partition(b"\r\n\r\n")
    assert statuses(received) == [status]
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["code"] == status


async def test_a_large_rejected_upload_still_sees_its_answer() -> None:
    async with serving(body_limit_bytes=2**20) as served, served.client() as client:
        response = await client.post("/v1/embeddings", content=b"x" * (20 * 2**20))
        await served.assert_alive()
    assert response.status_code == 413


@pytest.mark.parametrize("path", ["/nothing", "/metrics"])
async def test_a_body_that_nobody_reads_does_not_hold_the_connection(path: str) -> None:
    async with serving() as served:
        large = post(b"x" * 2**20, path=path)
        received = await served.talk(large + large + post(b"", "connection: close", path=path))
    assert len(statuses(received)) == 3


async def test_a_client_that_leaves_gives_its_room_back_while_its_work_still_runs() -> None:
    gate = Gate()
    async with serving(LetterModel(on_preprocess=gate)) as served:
        stream = await served.connect()
        await stream.send(EMBED)
        await gate.arrived()
        assert served.in_flight == 1
        await stream.aclose()
        await until(lambda: served.in_flight == 0)
        gate.open()
        await served.assert_alive()


async def test_nothing_remains_of_a_connection_that_its_client_closed() -> None:
    async with serving() as served:
        await served.assert_alive()
        tasks = len(anyio.get_running_tasks())
        for protocol in ({}, {"http1": False, "http2": True}):
            async with served.client(**protocol) as client:
                for _ in range(3):
                    await client.get("/health")
        await until(lambda: len(anyio.get_running_tasks()) <= tasks)


async def test_requests_on_one_connection_are_answered_one_after_the_other() -> None:
    async with serving() as served:
        received = await served.talk(EMBED * 3 + post(b'{"input":"a"}', "connection: close"))
    assert statuses(received) == [200] * 4


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param({"path": "/ü".encode()}, id="a path that is not ASCII"),
        pytest.param(
            {"path": None, "method": b"CONNECT"},
            id="CONNECT without a path",
            marks=needs("h2", "4.4", "a CONNECT without a path, for which older ones end the connection,"),
        ),
    ],
)
async def test_a_malformed_http2_stream_costs_only_itself(bad: dict[str, Any]) -> None:
    async with serving() as served:
        async with await served.connect() as stream:
            client = Http2(stream)
            await client.request(1, **bad)
            await client.request(3, path=b"/v1/embeddings", body=b'{"input":"a"}')
            assert await client.ends(1, 3) == {1: "reset", 3: "200"}
        await served.assert_alive()


async def test_http2_data_after_the_answer_costs_only_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staged_pool.api.http.general_path.LINGER_S", 0.01)
    async with serving(body_limit_bytes=50) as served:
        async with await served.connect() as stream:
            client = Http2(stream)
            await client.request(1, path=b"/v1/embeddings", body=b"x" * 51, ends=False)
            assert await client.ends(1) == {1: "413"}
            await until(lambda: served.server.state.requests == 0)  # past the linger: its stream is done with
            await client.send(1, b"x" * 10, ends=False)
            await client.request(3, path=b"/v1/embeddings", body=b'{"input":"a"}')
            assert (await client.ends(3))[3] == "200"
        await served.assert_alive()


async def test_an_unread_http2_stream_does_not_hold_the_others() -> None:
    async with serving() as served:
        async with await served.connect() as stream:
            client = Http2(stream)
            await client.request(1, path=b"/nothing", body=b"x", ends=False)
            for _ in range(40):
                await client.send(1, b"x", ends=False)
            await client.request(3, path=b"/v1/embeddings", body=b'{"input":"a"}')
            assert (await client.ends(3))[3] == "200"
        await served.assert_alive()


@pytest.mark.parametrize(
    "noise",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64,
        b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
        b"http2-settings: !!\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    ],
    ids=["a TLS hello", "broken HTTP/2", "a websocket", "a broken upgrade", "two lengths"],
)
async def test_noise_does_not_end_the_server(noise: bytes) -> None:
    async with serving() as served:
        async with await served.connect() as stream:
            await stream.send(noise)
            with anyio.move_on_after(0.2):
                await stream.receive()
        await served.assert_alive()


# Start and end


async def test_closing_finishes_what_is_in_flight_and_rejects_the_rest() -> None:
    gate = Gate()
    answers: list[httpx.Response] = []

    async def ask(client: httpx.AsyncClient) -> None:
        answers.append(await client.post("/v1/embeddings", json={"input": "a"}))

    model = LetterModel(on_preprocess=gate)
    async with serving(model) as served, served.client() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, client)
        await gate.arrived()
        tasks.start_soon(served.server.close)
        await until(lambda: served.server.registry.leaving)
        late = await client.post("/v1/embeddings", json={"input": "b"})
        ready = await client.get("/ready")
        health = await client.get("/health")
        gate.open()
    assert (late.status_code, ready.status_code, health.status_code) == (503, 503, 200)
    assert (late.headers["connection"], int(late.headers["retry-after"])) == ("close", 5)
    assert [answer.status_code for answer in answers] == [200]


async def test_before_a_drain_comes_a_lead_in_which_only_readiness_changes() -> None:
    async with serving(drain_lead_s=3600) as served, served.client() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(served.server.close)
        await until(lambda: bool(served.server.registry.unready()))
        ready, health = await client.get("/ready"), await client.get("/health")
        answer = await client.post("/v1/embeddings", json={"input": "a"})
        assert (ready.status_code, ready.json()["reason"]) == (503, "the server is draining")
        assert (health.status_code, answer.status_code) == (200, 200)
        assert "connection" not in answer.headers, "it would send a gateway to new connections of this server"
        assert not served.server.registry.leaving
        await served.server.close()  # a second call ends the lead
        assert served.server.registry.leaving


async def test_in_the_second_half_of_the_lead_answers_close_their_connections() -> None:
    looked: list[tuple[bool, bool]] = []

    async def look(server: Server) -> None:
        while not server.registry.leaving:
            looked.append((bool(server.registry.unready()), server.registry.closes_connections))
            await anyio.lowlevel.checkpoint()

    async with serving(drain_lead_s=0.1) as served, anyio.create_task_group() as tasks:
        tasks.start_soon(look, served.server)
        await served.server.close()
    assert [state for state in dict.fromkeys(looked) if any(state)] == [(True, False), (True, True)]


async def test_after_the_lead_the_server_drains() -> None:
    async with serving(drain_lead_s=0.01) as served:
        with anyio.fail_after(30):
            await served.server.close()
        assert served.server.registry.leaving


async def run_to_its_end(served: Server) -> None:
    with anyio.fail_after(30):
        await served.run(bind("127.0.0.1", 0))


async def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_reason(tmp_path: Path) -> None:
    server = server_on(EngineConfig(model=str(tmp_path / "nothing")))
    with pytest.raises(ConfigError, match="nothing"):
        await run_to_its_end(server)
    assert server.registry.not_ready == "the models could not be loaded"  # clients of that time learn of no folder


async def test_a_broken_engine_ends_the_server_with_its_reason() -> None:
    def lose(texts: object) -> None:
        raise DeviceLost("gone")

    listener = bind("127.0.0.1", 0)
    server = server_on(LetterModel(on_forward=lose))
    served = Served(server, listener)

    async def ask() -> None:
        await until(lambda: not server.registry.not_ready)
        assert statuses(await served.talk(EMBED)) == [503]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        with pytest.raises(DeviceLost, match="gone"):
            await server.run(listener)


@pytest.mark.parametrize("end", BAD_ENDS)
async def test_engines_that_end_unasked_end_the_server_with_an_error(
    end: BadEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_on(LetterModel())

    async def watch(_: EngineStages) -> None:
        await until(lambda: not server.registry.not_ready)
        await end.awaited()

    monkeypatch.setattr(EngineStages, "_watch", watch)
    with pytest.raises(DeviceLost):
        await run_to_its_end(server)
    assert server.registry.not_ready


async def test_a_server_that_a_stray_cancellation_ends_does_not_end_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stray(_: ServerState) -> None:
        await stray_cancellation()

    monkeypatch.setattr(ServerState, "watch", stray)
    with pytest.raises(RuntimeError, match="nobody has asked"):
        await run_to_its_end(server_on(LetterModel()))


async def test_the_first_signal_drains_and_the_second_ends_the_process_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watchdogs: list[tuple[float, int]] = []
    exits: list[int] = []
    monkeypatch.setattr(
        Server, "_end_process_after", lambda _, seconds, exit_code: watchdogs.append((seconds, exit_code))
    )
    monkeypatch.setattr("staged_pool.api.http.server.os._exit", exits.append)
    monkeypatch.setattr(
        "staged_pool.api.http.server.tune_garbage_collector", lambda: None
    )  # these are pytest's objects
    gate = Gate()
    listener = bind("127.0.0.1", 0)
    model = LetterModel(on_preprocess=gate)
    server = server_on(model, owns_process=True)
    served = Served(server, listener)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run, listener)
        await until(lambda: not server.registry.not_ready)
        async with await served.connect() as stream:
            await stream.send(EMBED)
            await gate.arrived()
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: server.registry.leaving)
            assert (watchdogs, exits) == ([(35, 3)], [])
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: bool(exits))
            gate.open()
            assert statuses(await read_to_end(stream)) == [200]
    assert exits == [128 + signal.SIGTERM]


async def test_an_open_idle_connection_does_not_hold_up_the_end() -> None:
    async with serving() as served:
        stream = await served.connect()
        await stream.send(EMBED)
        assert b"200" in await stream.receive()
        await served.server.close()
        async with stream:
            await read_to_end(stream)
