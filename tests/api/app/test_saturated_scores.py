"""Scores of 1 (or 0) in float32 are ranked by their logits, in every dialect."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import anyio.to_thread
import pytest

from staged_pool.client import AsyncClient, Client
from tests.servers.on_socket import serving
from tests.support.cards import CLASSIFIER, CROSS_ENCODER, LABELS
from tests.support.model import LetterModel, pair_logit

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning"),  # the client's own, on trio
]

QUERY = "abcd"
DOCUMENTS = ["a", "xyz", "abcd", "ab", "ba", "abc"]
BEST_FIRST = [2, 5, 3, 4, 0, 1]
"""By how many letters they share with the query; two are equal, and keep their order."""


SATURATED = 40.0
"""Number to add to each logit, so that its sigmoid is 1 in float32."""


def reranker(shift: float = SATURATED) -> LetterModel:
    """Return a cross-encoder with `shift` added to its logits."""
    return LetterModel(CROSS_ENCODER, logit_shift=shift)


RERANKS: list[tuple[str, dict[str, Any]]] = [
    ("/rerank", {"query": QUERY, "documents": DOCUMENTS}),
    ("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 6}),
    ("/v2/rerank", {"query": QUERY, "documents": DOCUMENTS, "return_documents": False}),
    ("/rerank", {"query": QUERY, "texts": DOCUMENTS}),
    ("/invocations", {"query": QUERY, "documents": DOCUMENTS}),
]


@pytest.mark.parametrize(("path", "body"), RERANKS)
async def test_a_ranking_over_http_goes_by_logits(path: str, body: dict[str, Any]) -> None:
    async with (
        serving(reranker()) as served,
        served.client() as client,
    ):
        answer = (await client.post(path, json=body)).json()
        rows = answer if isinstance(answer, list) else answer["results"]
        assert {row.get("relevance_score", row.get("score")) for row in rows} == {1.0}
        assert [row["index"] for row in rows] == BEST_FIRST


@pytest.mark.parametrize("shift", [20.0, 40.0, -150.0, -800.0])
async def test_who_sorts_weaviates_scores_sorts_by_logits(shift: float) -> None:
    """Its client sorts by the scores: all 1 in float32, and in doubles from a logit of 37."""
    async with serving(reranker(shift)) as served, served.client() as client:
        body = {"query": QUERY, "documents": DOCUMENTS, "property": ""}
        rows = (await client.post("/rerank", json=body)).json()["scores"]
        assert [row["document"] for row in rows] == DOCUMENTS
        scores = [row["score"] for row in rows]
        assert sorted(range(6), key=lambda place: -scores[place]) == BEST_FIRST
        assert scores[3] == scores[4]  # which have the same logit
        assert max(scores) - min(scores) < 1e-7


async def test_weaviates_scores_of_two_requests_compare() -> None:
    async with serving(reranker(20.0)) as served, served.client() as client:
        found = []
        for documents in (DOCUMENTS[:3], DOCUMENTS[3:]):
            answer = await client.post("/rerank", json={"query": QUERY, "documents": documents, "property": ""})
            found += [row["score"] for row in answer.json()["scores"]]
        assert sorted(range(6), key=lambda place: -found[place]) == BEST_FIRST


@pytest.mark.parametrize("shift", [40.0, -150.0])
async def test_what_top_n_leaves_is_the_best(shift: float) -> None:
    async with serving(reranker(shift)) as served, served.client() as client:
        body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}
        answer = (await client.post("/rerank", json=body)).json()
        assert [row["index"] for row in answer["results"]] == BEST_FIRST[:2]
        ranked = await served.engine.rerank(QUERY, DOCUMENTS, top_n=2)
        assert [one.index for one in ranked.ranking] == BEST_FIRST[:2]


@pytest.mark.parametrize("batch", [1, 2, 64])
async def test_both_clients_rank_by_logits_also_across_batches(batch: int) -> None:
    async with serving(reranker()) as served:
        url = f"http://127.0.0.1:{served.port}"
        async with AsyncClient(url, batch_items=batch) as client:
            found = await client.rerank(QUERY, DOCUMENTS)
        assert [one.index for one in found.ranking] == BEST_FIRST
        assert {one.score for one in found.ranking} == {1.0}

        def in_thread() -> list[int]:
            with Client(url, batch_items=batch) as blocking:
                return [one.index for one in blocking.rerank(QUERY, DOCUMENTS, top_n=3).ranking]

        assert await anyio.to_thread.run_sync(in_thread) == BEST_FIRST[:3]


async def test_scores_show_their_logits_only_where_they_are_asked_for() -> None:
    async with (
        serving(reranker()) as served,
        served.client() as client,
    ):
        ask = partial(client.post, "/score")
        body: dict[str, Any] = {"queries": QUERY, "documents": DOCUMENTS}
        plain = (await ask(json=body)).json()["data"]
        assert all(set(row) == {"index", "object", "score"} for row in plain)
        told = (await ask(json=body | {"return_logits": True})).json()["data"]
        assert [row["logit"] for row in told] == [pair_logit(QUERY, text) + SATURATED for text in DOCUMENTS]
        lines = await ask(json=body | {"return_logits": True}, headers={"accept": "application/x-ndjson"})
        assert lines.text.count('"logit":') == len(DOCUMENTS)


async def test_labels_are_ordered_by_logits() -> None:
    """Sigmoids of all three are 1; the order of labels is not that of logits."""
    model = LetterModel(replace(CLASSIFIER, activation="sigmoid"), logit_shift=SATURATED)
    async with serving(model) as served, served.client() as client:
        text = "abbccc"  # logits 41, 42, 43
        answer = (await client.post("/classify", json={"input": text})).json()["data"][0]
        assert answer["probs"] == [1.0, 1.0, 1.0]
        assert answer["label"] == "c"
        theirs = (await client.post("/predict", json={"inputs": text})).json()
        assert [row["label"] for row in theirs] == [*reversed(LABELS)]
        infinitys = (await client.post("/classify", json={"input": text, "raw_scores": False})).json()["data"][0]
        assert [row["label"] for row in infinitys] == [*reversed(LABELS)]
