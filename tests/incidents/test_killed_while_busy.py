"""Public incidents of healthy servers that were killed, because their probes had no answer.

Each is repeated on a real server, whose probes must all be answered. The usual design, beside it, fails them.
docs/incidents.md has the table.
"""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import numpy as np
import pytest
from blockbuster import BlockBuster
from PIL import Image
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from staged_pool.api.config import ServerConfig
from staged_pool.api.http.listener import bind
from staged_pool.api.http.server import Server
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.memory.governor import MemoryGovernor
from tests.incidents import usual
from tests.incidents.probing import crowd, crowded, embed, in_thread, kubelet, post_embeddings, probe
from tests.servers.engines import opening
from tests.servers.on_socket import serving
from tests.servers.tiny_models import tiny_models
from tests.support.cards import BOTH_LANES
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

SEEN = 5
"""Probes that a test waits for, while the server is busy."""

DEFAULT_THREADS = 40
"""Threads of anyio's default limiter, which an ASGI application shares with all plain functions."""


@pytest.fixture(scope="module")
def embedder() -> Sequence[EngineConfig]:
    """A real model, which is built before an event loop runs."""
    return tiny_models("embedder")


@pytest.fixture(scope="module")
def png() -> bytes:
    """An image of a megapixel, with noise that does not compress."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 255, (1000, 1000, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def loops_may_block(nothing_blocks_the_event_loop: BlockBuster) -> None:
    """For servers in the usual designs."""
    nothing_blocks_the_event_loop.deactivate()


# A model that takes long to load


async def test_a_model_that_loads_for_long_fails_no_liveness_probe(embedder: Sequence[EngineConfig]) -> None:
    """Triton's pods were killed for `connection refused` on `/v2/health/live` while models loaded.

    See https://github.com/triton-inference-server/server/issues/7154.
    """
    held = Gate()
    configs, open_engines = opening(embedder)

    @asynccontextmanager
    async def load(configs: Sequence[EngineConfig], memory: MemoryGovernor) -> AsyncIterator[Mapping[str, Engine]]:
        await in_thread(held)
        async with open_engines(configs, memory) as engines:
            yield engines

    server, listener = Server(ServerConfig(), configs, open_engines=load), bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run, listener)
        async with kubelet(port) as health, kubelet(port, "/ready") as ready:
            await held.arrived()
            await until(lambda: len(health) >= SEEN <= len(ready))
            assert {(each.status, each.reason) for each in ready} == {(503, "loading the model")}
            held.open()
            await until(lambda: ready[-1].status == 200, within_s=120)  # the weights are read beside the probes
        assert [each for each in health if not each.passes] == []
        assert {each.status for each in ready} == {503, 200}
        assert (await in_thread(embed, port, "a text")).status == 200
        await server.close()


def test_a_server_that_loads_before_it_listens_refuses_its_probe(loops_may_block: None) -> None:
    """The probe of the test above, on the design of the incident."""
    held = Gate()
    routes = [Route("/health", usual.alive)]
    with usual.running(routes, lifespan=usual.loading(held), waits=False) as port:
        assert probe(port).failure == "connection refused"
        held.open()


# Forty threads, all taken


async def test_preprocess_that_holds_every_thread_starves_no_probe() -> None:
    """Onyx's pods crashed hourly: a plain `/health` waited for one of anyio's 40 threads, all held by requests.

    See https://github.com/onyx-dot-app/onyx/pull/8314.
    """
    foreign, slow = Gate(), Gate()
    limiter = anyio.to_thread.current_default_thread_limiter()

    async def call_a_plain_function() -> None:
        await anyio.to_thread.run_sync(foreign)

    async with serving(LetterModel(on_preprocess=slow)) as served, anyio.create_task_group() as tasks:
        for _ in range(DEFAULT_THREADS):
            tasks.start_soon(call_a_plain_function)
        await until(lambda: limiter.borrowed_tokens == limiter.total_tokens == DEFAULT_THREADS)
        async with crowded(served.port, 2 * DEFAULT_THREADS, post_embeddings("a text")):
            await until(lambda: served.in_flight == 2 * DEFAULT_THREADS)
            async with kubelet(served.port) as health, kubelet(served.port, "/ready") as ready:
                await until(lambda: len(health) >= SEEN <= len(ready))
            assert [each for each in (*health, *ready) if not each.passes] == []
            slow.open()
            assert (await in_thread(embed, served.port, "another")).status == 200, "it serves without these threads"
            foreign.open()


def test_a_plain_function_waits_for_a_thread_that_requests_hold(loops_may_block: None) -> None:
    """The probe of the test above, on the design of the incident."""
    held = Gate()

    def embed_in_a_thread(request: Request) -> Response:
        held()
        return Response()

    routes = [Route("/health", usual.alive_in_a_thread), Route("/v1/embeddings", embed_in_a_thread, methods=["POST"])]
    with usual.running(routes) as port:
        assert probe(port).passes
        with crowd(port, DEFAULT_THREADS, post_embeddings("a text")):
            assert probe(port).failure == "timeout"
            held.open()


# Huge inputs


@pytest.mark.parametrize("held_in", ["preprocess", "image"])
async def test_inputs_that_are_prepared_for_long_delay_no_probe(held_in: str, png: bytes) -> None:
    """vLLM's router tokenized prompts on its event loop, so that probes starved: 25 restarts in an hour.

    See https://github.com/vllm-project/production-stack/issues/1016.
    """
    held = Gate()

    def read(data: bytes) -> str:
        with Image.open(io.BytesIO(data)) as image:
            image.convert("RGB").resize((32, 32))
        held()
        return "image"

    model = LetterModel(card=BOTH_LANES, read_image=read, on_preprocess=held if held_in == "preprocess" else print_none)
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    sent = "a text" if held_in == "preprocess" else {"image": url}
    async with serving(model) as served, served.client() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: client.post("/v1/embeddings", json={"input": [sent]}))
        async with kubelet(served.port) as health:
            await held.arrived()
            begun = len(health)
            await until(lambda: len(health) >= begun + SEEN)
            held.open()
            await until(lambda: served.in_flight == 0)
        assert [each for each in health if not each.passes] == []


def print_none(texts: object) -> None:
    """Hold nothing."""


async def test_megabytes_of_text_for_a_real_tokenizer_delay_no_probe(embedder: Sequence[EngineConfig]) -> None:
    """vLLM's `/health` took over a second beside image transforms on its event loop.

    See https://github.com/vllm-project/vllm/pull/34789.
    """
    texts = [f"{number} words and more words " * 20_000 for number in range(4)]
    body = {"input": texts, "truncate_prompt_tokens": -1}
    async with serving(*embedder) as served, served.client() as client:
        async with kubelet(served.port) as health:
            answer = await client.post("/v1/embeddings", json=body)
            await until(lambda: len(health) >= SEEN)
        assert answer.status_code == 200
        assert [each for each in health if not each.passes] == []


def test_a_loop_that_tokenizes_answers_no_probe(loops_may_block: None) -> None:
    """The probe of the tests above, on the design of the incident."""
    held = Gate()

    async def embed_on_the_loop(request: Request) -> Response:
        held()
        return Response()

    routes = [Route("/health", usual.alive), Route("/v1/embeddings", embed_on_the_loop, methods=["POST"])]
    with usual.running(routes) as port:
        assert probe(port).passes
        with crowd(port, 1, post_embeddings("a text")):
            assert probe(port).failure == "timeout"
            held.open()


# Every connection taken


@pytest.mark.parametrize("sent", [b"", b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"])
async def test_idle_and_slow_connections_keep_no_probe_out(sent: bytes) -> None:
    """Block Node's pods restarted: idle connections had filled the limit of 1,000.

    See https://github.com/hiero-ledger/hiero-block-node/issues/3168.
    """
    limit = 256
    async with serving(max_connections=limit) as served:
        async with kubelet(served.port) as health, crowded(served.port, 2 * limit, sent):
            begun = len(health)
            await until(lambda: len(health) >= begun + SEEN)
            assert (await in_thread(embed, served.port, "a text")).status == 200
        assert [each for each in health if not each.passes] == []


async def test_connections_that_all_work_keep_no_probe_out() -> None:
    """Orion was killed under load, because requests held all of its connections.

    See https://github.com/FIWARE/context.Orion-LD/issues/646.
    """
    limit, held = 64, Gate()
    async with serving(LetterModel(on_forward=held), max_connections=limit) as served:
        async with crowded(served.port, limit, post_embeddings("a text")):
            await held.arrived()
            await until(lambda: served.in_flight >= limit - 8)  # one address may not have all of them
            async with kubelet(served.port) as health:
                await until(lambda: len(health) >= SEEN)
            assert [each for each in health if not each.passes] == []
            held.open()


def test_a_server_that_only_counts_connections_rejects_its_probe(loops_may_block: None) -> None:
    """The probe of the tests above, on the design of the incident."""
    with usual.running([Route("/health", usual.alive)], limit_concurrency=8) as port:
        assert probe(port).passes
        with crowd(port, 8):
            assert probe(port).status == 503
