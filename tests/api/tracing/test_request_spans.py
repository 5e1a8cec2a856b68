"""Spans of requests, stages and batches, as a collector gets them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from structlog.typing import EventDict

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.pipelines.file import PipelineFile, read_pipelines
from tests.servers.byte_client import post
from tests.servers.on_socket import Served, serving
from tests.servers.trace_receiver import Collector, attributes, collecting
from tests.support.cards import CROSS_ENCODER, EMBEDDER
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.stages import batch_stages
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
SECRET = "a text that nobody else may read"


async def ask(served: Served, path: str = "/v1/embeddings", **request: Any) -> httpx.Response:
    request = {"json": {"input": SECRET}, **request}
    async with served.client() as client:
        return await client.post(path, **request)


async def collected(*model: LetterModel, ratio: float = 1.0, ask: Any, **config: Any) -> Collector:
    """Run a server and the requests of `ask`; return the collector once the server has ended."""
    async with collecting() as collector:
        async with serving(*model, trace_endpoint=collector.url, trace_ratio=ratio, **config) as served:
            await ask(served)
    return collector


async def test_a_request_has_a_span_and_one_for_each_stage_below_it() -> None:
    collector = await collected(ask=lambda served: ask(served, json={"input": ["ab", "abc"], "dimensions": 2}))
    assert collector.names == [
        "batch text", "device", "embeddings letters", "parse", "postprocess", "preprocess", "queue",
    ]  # fmt: skip
    request = collector.named("embeddings letters")
    stages = collector.below(request)
    assert list(stages) == ["parse", "preprocess", "queue", "device", "postprocess"]
    assert {span.trace_id for span in stages.values()} == {request.trace_id}
    assert all(attributes(span) == {"staged_pool.items": 2} for span in stages.values())
    times = [(span.start_time_unix_nano, span.end_time_unix_nano) for span in stages.values()]
    assert times == sorted(times)
    assert all(began <= ended for began, ended in times)
    assert request.start_time_unix_nano <= times[0][0]
    assert times[-1][1] <= request.end_time_unix_nano


PIPELINE = """
name = "search"

[[stage]]
name = "embed"
model = "letters"
outputs = ["multi_vector"]
on_error = "skip"

[[stage]]
name = "rerank"
task = "maxsim"
from = ["request.query", "embed"]
"""


@pytest.fixture
def search(tmp_path: Path) -> Sequence[PipelineFile]:
    file = tmp_path / "search.toml"
    file.write_text(PIPELINE)
    return list(read_pipelines([file]))


@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson"])
async def test_a_request_to_a_pipeline_has_a_span_for_each_of_its_stages(
    accept: str, search: Sequence[PipelineFile]
) -> None:
    body = {"query": "abc", "data": ["xyz", "abc", "NaN"]}
    collector = await collected(
        LetterModel(card=EMBEDDER),
        pipelines=search,
        ask=lambda served: ask(served, "/pipelines/search", json=body, headers={"accept": accept}),
    )
    (request,) = collector.requests
    assert request.name == "POST /pipelines/search"
    stages = collector.below(request)
    assert list(stages) == ["stage embed", "stage rerank"]
    embed, rerank = stages.values()
    assert request.start_time_unix_nano <= embed.start_time_unix_nano <= rerank.start_time_unix_nano
    assert embed.end_time_unix_nano <= rerank.end_time_unix_nano <= request.end_time_unix_nano
    assert not attributes(embed)


async def test_the_span_of_a_request_says_what_was_asked_and_what_came() -> None:
    body = {"input": ["ab", "abc"], "encoding_format": "base64", "dimensions": 2}
    collector = await collected(ask=lambda served: ask(served, json=body, headers={"x-priority": "bulk"}))
    (request,) = collector.requests
    assert attributes(request) == {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": "staged_pool",
        "gen_ai.request.model": "letters",
        "gen_ai.response.model": "letters",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.embeddings.dimension.count": 2,
        "gen_ai.request.encoding_formats": ["base64"],
        "http.route": "/v1/embeddings",
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "staged_pool.items": 2,
        "staged_pool.priority": "bulk",
    }
    assert request.status.code == Status.STATUS_CODE_UNSET
    assert not request.parent_span_id


async def test_a_request_belongs_to_the_span_of_its_caller(logged: list[EventDict]) -> None:
    headers = {**SAMPLED, "tracestate": "vendor=abc"}
    collector = await collected(ratio=0.0, ask=lambda served: ask(served, headers=headers))
    (request,) = collector.requests
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, CALLER)
    assert request.trace_state == "vendor=abc"
    assert {span.trace_id.hex() for span in collector.below(request).values()} == {TRACE}
    (line,) = (line for line in logged if line["event"] == "request.finished")
    assert line["trace_id"] == TRACE


async def test_the_log_has_the_id_of_a_trace_that_begins_here(logged: list[EventDict]) -> None:
    collector = await collected(ask=ask)
    (line,) = (line for line in logged if line["event"] == "request.finished")
    assert line["trace_id"] == collector.requests[0].trace_id.hex()


async def test_a_trace_that_its_caller_does_not_record_has_no_spans() -> None:
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-00"}
    collector = await collected(ratio=1.0, ask=lambda served: ask(served, headers=headers))
    assert not collector.spans


async def test_without_a_trace_the_ratio_decides(logged: list[EventDict]) -> None:
    async def ask_often(served: Served) -> None:
        async with served.client() as client:
            for _ in range(64):
                assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200

    collector = await collected(ratio=0.5, ask=ask_often)
    logged_ids = [line["trace_id"] for line in logged if "trace_id" in line]
    assert [span.trace_id.hex() for span in collector.requests] == logged_ids
    assert 8 < len(logged_ids) < 56  # all outside come once in 10^10 runs


async def test_a_score_is_named_for_its_operation() -> None:
    async def ask_both(served: Served) -> None:
        await ask(served, "/v1/score", json={"text_1": "ab", "text_2": "abc"})
        await ask(served, "/rerank", json={"query": "ab", "documents": ["abc"]})

    collector = await collected(LetterModel(CROSS_ENCODER), ask=ask_both)
    assert [span.name for span in collector.requests] == ["score letters", "rerank letters"]


async def test_a_request_for_no_task_is_named_for_its_route() -> None:
    async def ask_others(served: Served) -> None:
        async with served.client() as client:
            await client.get("/v1/models")
            await client.get("/health")
            await client.get("/metrics")
            await client.get("/nobody/knows/" + "x" * 20)
            await client.options("/v1/models")

    collector = await collected(ask=ask_others)
    assert [span.name for span in collector.requests] == ["GET /v1/models", "GET other", "OPTIONS /v1/models"]


@pytest.mark.parametrize(
    ("request_of", "status", "error"),
    [
        ({"json": {"input": 5}}, 400, "invalid_input"),
        ({"json": {"input": SECRET, "model": "nobody"}}, 404, "unknown_model"),
        ({"json": {"input": "NaN"}}, 424, "model_failed"),
        ({"content": SECRET.encode(), "headers": {"content-type": "text/plain"}}, 415, "unsupported_media"),
    ],
)
async def test_a_failed_request_says_why(request_of: dict[str, Any], status: int, error: str) -> None:
    collector = await collected(ask=lambda served: ask(served, **request_of))
    (request,) = collector.requests
    found = attributes(request)
    assert (found["http.response.status_code"], found["error.type"]) == (status, error)
    assert (request.status.code == Status.STATUS_CODE_ERROR) == (status >= 500)
    assert found["gen_ai.operation.name"] == "embeddings"


async def test_rejected_requests_have_spans_on_both_paths() -> None:
    gate = Gate()

    async def overload(served: Served) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, served)
            await gate.arrived()
            assert (await ask(served)).status_code == 429  # the engine has rejected none before
            assert (await ask(served)).status_code == 429  # the front door does, before the body is decoded
            gate.open()

    collector = await collected(LetterModel(on_forward=gate), engine=EngineConfig(max_requests=1), ask=overload)
    rejected = [span for span in collector.requests if attributes(span)["http.response.status_code"] == 429]
    assert [(span.name, attributes(span)["error.type"], span.status.code) for span in rejected] == [
        ("embeddings letters", "overloaded", Status.STATUS_CODE_UNSET),
        ("embeddings", "overloaded", Status.STATUS_CODE_UNSET),
    ]
    assert not any(collector.below(span) for span in rejected)


async def test_a_client_that_leaves_ends_its_span() -> None:
    gate = Gate()

    async def leave(served: Served) -> None:
        async with await served.connect() as stream:
            await stream.send(post(json.dumps({"input": SECRET}).encode()))
            await gate.arrived()
        await until(lambda: served.in_flight == 0)
        gate.open()

    collector = await collected(LetterModel(on_forward=gate), ask=leave)
    (request,) = collector.requests
    found = attributes(request)
    assert (found["http.response.status_code"], found["error.type"]) == (499, "abandoned")
    assert list(collector.below(request)) == ["parse", "preprocess"]


async def test_a_batch_has_links_to_its_requests() -> None:
    gate = Gate()

    async def fill(served: Served) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, served)
            await gate.arrived()
            for number in range(40):  # texts of one token: more would be cut ahead, as a full batch
                tasks.start_soon(lambda number: ask(served, json={"input": chr(ord("A") + number)}), number)
            await until(lambda: served.in_flight == 41)
            await until(lambda: batch_stages(served.engine)["text"].waiting == 40)
            gate.open()

    collector = await collected(LetterModel(on_forward=gate), ask=fill)
    batches = [span for span in collector.spans if span.name == "batch text"]
    assert not any(span.parent_span_id for span in batches)
    first, *others = sorted(batches, key=lambda span: span.start_time_unix_nano)
    assert [len(span.links) for span in (first,)] == [1]
    assert sum(int(str(attributes(span)["staged_pool.items"])) for span in others) == 40
    spans = {(span.trace_id, span.span_id): span for span in collector.requests}
    for batch in batches:
        found = attributes(batch)
        assert found["staged_pool.lane"] == "text"
        assert found["staged_pool.trigger"] in ("demand", "size", "cost", "share")
        assert len(batch.links) == min(int(str(found["staged_pool.items"])), 32)
        assert all((link.trace_id, link.span_id) in spans for link in batch.links)
        assert found["gen_ai.response.model"] == "letters"
    assert max(len(span.links) for span in others) == 32


async def test_requests_with_one_row_share_the_link_of_its_batch() -> None:
    gate = Gate()

    async def twice(served: Served) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, served)
            await gate.arrived()
            tasks.start_soon(ask, served)
            await until(lambda: served.in_flight == 2)
            await until(lambda: batch_stages(served.engine)["text"].waiting == 1)
            gate.open()

    collector = await collected(LetterModel(on_forward=gate), ask=twice)
    batch = collector.named("batch text")
    assert attributes(batch)["staged_pool.items"] == 1
    linked = {link.span_id for link in batch.links}
    assert linked == {span.span_id for span in collector.requests}


async def test_streamed_lines_are_one_request() -> None:
    headers = {"accept": "application/x-ndjson"}
    collector = await collected(ask=lambda served: ask(served, json={"input": ["ab", "abc"]}, headers=headers))
    (request,) = collector.requests
    assert list(collector.below(request)) == ["parse", "preprocess", "queue", "device", "postprocess"]
    assert attributes(request)["gen_ai.usage.input_tokens"] == 5


async def test_no_text_vector_key_or_tenant_leaves_the_server() -> None:
    headers = {
        "authorization": "Bearer key-of-somebody", "x-tenant": "somebody", "x-request-id": "an-id",
    }  # fmt: skip

    async def ask_all(served: Served) -> None:
        async with served.client(headers=headers) as client:
            await client.post("/v1/embeddings?query=of-somebody", json={"input": SECRET, "user": "somebody"})
            await client.post("/v1/embeddings", json={"input": SECRET, "model": "model-of-somebody"})
            await client.post("/v1/embeddings", json={"input": SECRET, "encoding_format": "format-of-somebody"})
            await client.get("/path/of/somebody")

    collector = await collected(ask=ask_all, api_keys=("key-of-somebody",), tenant_header="X-Tenant")
    assert len(collector.requests) == 4
    for secret in (SECRET, "somebody", "an-id", "127.0.0.1"):
        assert secret.encode() not in collector.raw
