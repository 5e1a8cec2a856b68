"""Lines have the answers of the routes. Where a route rejects, the work waits."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest

from staged_pool.api.app.batch_work import BatchWork
from staged_pool.api.bulk.batch_lines import BatchAnswers, BatchLine
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.errors import EngineStopped
from tests.runtime.test_zero_shot import NLI
from tests.servers.in_memory import InMemory, serving_in_memory
from tests.support.cards import CARD, CLASSIFIER, CROSS_ENCODER, EMBEDDER
from tests.support.gates import Gate
from tests.support.model import LetterModel

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning"),  # the client's own, on trio
]


@asynccontextmanager
async def working(*cards: ModelCard) -> AsyncIterator[tuple[InMemory, BatchWork]]:
    """Run engines, their routes, and the work on them."""
    async with serving_in_memory(*(LetterModel(card) for card in cards)) as served:
        yield served, BatchWork(served.registry, BatchAnswers("job"), auto_truncate=True)


def line(url: str, body: object, number: int = 0) -> BatchLine:
    """Make a line that is a request."""
    return BatchLine(number, "mine", url, body if isinstance(body, bytes) else json.dumps(body).encode())


async def answer(work: BatchWork, url: str, body: object) -> Any:
    """Return the answer to a request."""
    (found,) = await work.do([line(url, body)])
    return json.loads(b"".join(found.pieces()))


REQUESTS: Sequence[tuple[ModelCard, str, object]] = [
    (CARD, "/v1/embeddings", {"input": ["one", "two"], "model": "letters"}),
    (CARD, "/v1/embeddings", {"input": "one", "encoding_format": "base64"}),
    (CARD, "/embeddings", {"input": "one"}),
    (CARD, "/v1/embeddings", {"input": "one", "model": "other"}),
    (CARD, "/v1/embeddings", {"input": ""}),
    (CARD, "/v1/embeddings", {"input": ["one", "x" * 1000]}),
    (CARD, "/v1/embeddings", {"text": "one"}),
    (CARD, "/v1/embeddings", b'{"input": "one"'),
    (CARD, "/v1/embeddings", {"input": "NaN"}),
    (CARD, "/v2/embed", {"model": "letters", "texts": ["one"]}),
    (CARD, "/api/embed", {"model": "letters", "input": ["one"]}),
    (CARD, "/api/embed", {"model": "letters", "input": []}),
    (CARD, "/embed", {"inputs": ["one"]}),
    (CARD, "/embed", {"inputs": 5}),
    (CARD, "/classify", {"input": "one"}),
    (CARD, "/nowhere", {"input": "one"}),
    (CARD, "/health", {"input": "one"}),
    (EMBEDDER, "/pooling", {"input": "one", "task": "token_embed"}),
    (CLASSIFIER, "/classify", {"input": ["abc", "b"]}),
    (CLASSIFIER, "/predict", {"inputs": "abc"}),
    (NLI, "/classify", {"input": ["cc", "d"], "candidate_labels": ["c", "acca"], "multi_label": True}),
    (NLI, "/classify", {"input": ["cc", "d"], "candidate_labels": ["c", "c"]}),
    (NLI, "/predict", {"inputs": ["cc", "d"], "parameters": {"candidate_labels": ["c", "acca"]}}),
    (CLASSIFIER, "/classify", {"input": "cc", "candidate_labels": ["c", "acca"]}),
    (EMBEDDER, "/pooling", {"input": "aab", "task": "sparse", "max_active_dims": 1}),
    (EMBEDDER, "/pooling", {"input": "aab", "task": "token_embed", "return_offsets": True}),
    (CROSS_ENCODER, "/v1/score", {"text_1": "one", "text_2": ["two", "three"]}),
    (CROSS_ENCODER, "/score", {"text_1": "one", "text_2": "two"}),
    (CROSS_ENCODER, "/v1/rerank", {"query": "one", "documents": ["two", "three"], "top_n": 1}),
    (CROSS_ENCODER, "/rerank", {"query": "one", "texts": 5}),
]


@pytest.mark.parametrize(("card", "url", "body"), REQUESTS)
async def test_a_line_has_the_answer_of_the_route(card: ModelCard, url: str, body: object) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", "x-request-id": "job-0"}
    async with working(card) as (served, work), served.client() as client:
        sent = await client.post(url, content=content, headers=headers)
        found = await answer(work, url, body)
    assert (found["id"], found["custom_id"], found["error"]) == ("batch_req_job-0", "mine", None)
    response = found["response"]
    assert response["request_id"] == "job-0"
    if url == "/health":  # a route that is no task
        assert response["status_code"] == 404
        return
    assert response["status_code"] == sent.status_code
    assert _timeless(response["body"]) == _timeless(sent.json())


def _timeless(body: Any) -> Any:
    """Return an answer without times and lists of routes."""
    if not isinstance(body, dict):
        return body
    times = ("created", "total_duration", "load_duration")
    kept = {name: value for name, value in body.items() if name not in times}
    if "There is no route" in str(body):
        return "no route"
    return kept


async def test_a_batch_reaches_the_model_that_each_line_names() -> None:
    ranker = replace(CROSS_ENCODER, name="ranker")
    async with working(CARD, ranker) as (_, work):
        vectors = await answer(work, "/v1/embeddings", {"input": "one", "model": "letters"})
        ranking = await answer(work, "/v1/rerank", {"query": "one", "documents": ["two"]})
        wrong = await answer(work, "/v1/embeddings", {"input": "one", "model": "ranker"})
    assert vectors["response"]["body"]["model"] == "letters"
    assert ranking["response"]["body"]["model"] == "ranker"
    assert wrong["response"]["status_code"] == 501


async def test_of_several_classifiers_the_one_that_can_chooses_among_labels() -> None:
    async with working(CLASSIFIER, replace(NLI, name="nli")) as (_, work):
        plain = await answer(work, "/classify", {"input": "cc", "candidate_labels": ["c", "acca"]})
        hub = await answer(work, "/predict", {"inputs": "cc", "parameters": {"candidate_labels": ["c", "acca"]}})
    body = plain["response"]["body"]
    assert (body["model"], body["labels"], body["data"][0]["label"]) == ("nli", ["c", "acca"], "acca")
    assert [each["label"] for each in hub["response"]["body"]] == ["acca", "c"]


async def test_an_answer_that_is_not_json_is_an_error_of_the_line() -> None:
    async with working(CARD) as (_, work):
        found = await answer(work, "/v1/embeddings", {"input": "one", "encoding_format": "bytes"})
    assert found["response"] is None
    assert found["error"]["code"] == "answer_not_json"


async def test_an_engine_that_stops_ends_the_job_and_not_the_line() -> None:
    async with working(CARD) as (served, work):
        served.registry.close("the server is draining")
        with pytest.raises(EngineStopped, match="the server is draining"):
            await work.do([line("/v1/embeddings", {"input": "one"})])


async def test_overload_is_waited_for() -> None:
    """With room for one request, five are rejected many times, and all are answered."""
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with serving_in_memory(model, engine=EngineConfig(max_requests=1)) as served:
        work = BatchWork(served.registry, BatchAnswers("job"), auto_truncate=True)
        found: list[Any] = []

        async def do(number: int) -> None:
            found.extend(await work.do([line("/v1/embeddings", {"input": f"text {number}"}, number)]))

        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(do, number)
            await gate.arrived()
            while not served.engine.statistics().admission.refused:
                await anyio.lowlevel.checkpoint()
            gate.open()
    assert sorted(each.number for each in found) == list(range(5))
    assert not any(each.failed for each in found)


async def test_lines_have_bulk_priority() -> None:
    gate = Gate()
    async with serving_in_memory(LetterModel(on_forward=gate)) as served:
        work = BatchWork(served.registry, BatchAnswers("job"), auto_truncate=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work.do, [line("/v1/embeddings", {"input": "one"})])
            await gate.arrived()
            assert {
                str(priority): each.requests for priority, each in served.engine.statistics().priorities.items()
            } == {"interactive": 0, "bulk": 1}
            gate.open()
