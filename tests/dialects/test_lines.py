"""Answers of one object a line, over a real connection."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from numpy.testing import assert_allclose

from tests.dialects.answers import answer
from tests.dialects.conftest import ClientOf

EMBEDDER = "jina-matryoshka"
TEXTS = [f"the statement number {number}" for number in range(40)]
ASKING = {"accept": "application/x-ndjson"}


def lines(client: httpx.Client, path: str, **body: Any) -> list[Any]:
    response = client.post(path, json=body, headers={**ASKING, "x-request-id": "r"})
    assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson")
    assert response.headers["x-request-id"] == "r"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def test_embeddings_come_one_a_line_and_then_the_usage(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    whole = answer(client, "/v1/embeddings", input=TEXTS)
    *rows, last = lines(client, "/v1/embeddings", input=TEXTS)
    assert sorted(row["index"] for row in rows) == list(range(40))
    for row in rows:
        assert set(row) == {"index", "object", "embedding"}
        assert_allclose(row["embedding"], whole["data"][row["index"]]["embedding"], atol=1e-5)
    assert (last["id"], last["object"], last["model"], last["usage"]) == ("embd-r", "list", EMBEDDER, whole["usage"])
    *_, last = lines(client, "/v1/embeddings", input="a", request_id="own", encoding_format="base64")
    assert last["id"] == "embd-own"


@pytest.mark.parametrize("kind", [EMBEDDER, "ce-bert-1label"])
def test_scores_come_one_a_line(kind: str, client_of: ClientOf) -> None:
    client = client_of(kind)
    whole = answer(client, "/score", queries=TEXTS[0], documents=TEXTS)
    for path, body in (
        ("/score", {"queries": TEXTS[0], "documents": TEXTS}),
        ("/v1/rerank", {"query": TEXTS[0], "documents": TEXTS}),
        ("/rerank", {"query": TEXTS[0], "documents": TEXTS, "return_documents": False}),
    ):
        *rows, last = lines(client, path, **body)
        assert sorted(row["index"] for row in rows) == list(range(40))
        for row in rows:
            score = row["score"] if path == "/score" else row["relevance_score"]
            assert_allclose(score, whole["data"][row["index"]]["score"], atol=1e-5)
            assert row.get("document", {"text": TEXTS[row["index"]]})["text"] == TEXTS[row["index"]]
            assert ("document" in row) == (path == "/v1/rerank")
        assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_what_is_wrong_before_the_first_line_is_answered_as_ever(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    for path, status, body in (
        ("/v1/embeddings", 400, {}),
        ("/v1/embeddings", 400, {"input": "a", "encoding_format": "bytes"}),
        ("/v1/rerank", 400, {"query": "a", "documents": ["b"], "top_n": 1}),
        ("/v1/embeddings", 404, {"input": "a", "model": "x"}),
    ):
        response = client.post(path, json=body, headers=ASKING)
        assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
        assert set(response.json()["error"]) >= {"message", "type", "param", "code"}


def test_an_error_after_the_first_line_is_the_last_line(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER, max_batch_items=1, chunk_items=1)
    many = ["the statement"] * 300
    *rows, last = lines(client, "/v1/embeddings", input=[*many, "too long " * 200])
    assert last["error"]["code"] == 400
    assert last["error"]["index"] == 300
    assert all(row["object"] == "embedding" for row in rows)
    assert len({row["index"] for row in rows}) == len(rows) < 301


def test_a_reader_who_stops_holds_up_no_other(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    body = json.dumps({"input": ["the statement"] * 1500}).encode()
    with socket.create_connection((client.base_url.host, client.base_url.port or 80), timeout=60) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
        head = "POST /v1/embeddings HTTP/1.1\r\nhost: test\r\naccept: application/x-ndjson\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        slow.sendall(head.encode() + body)
        assert slow.recv(12) == b"HTTP/1.1 200"
        for _ in range(5):
            answer(client, "/v1/embeddings", input="others")
        received = b""
        while piece := slow.recv(2**16):
            received += piece
    assert received.count(b'"object":"embedding"') == 1500
    assert b'"usage"' in received
