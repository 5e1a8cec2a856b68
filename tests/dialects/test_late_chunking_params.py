"""vLLM's `late_chunking_params`: vectors of the chunks of each text, at each door that takes the body."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest
from blockbuster import BlockBuster
from numpy.testing import assert_allclose

import staged_pool
from staged_pool.api.app.batch_work import BatchWork
from staged_pool.api.bulk.batch_lines import BatchAnswers, BatchLine
from staged_pool.stages.errors import InvalidInput, Unsupported
from tests.dialects.answers import answer, openai_vectors, rejection
from tests.dialects.conftest import ClientOf
from tests.models.conftest import TinyFolder
from tests.models.oracle import stanford_colbert
from tests.models.tiny.multi_vector import DIMENSIONS
from tests.servers.in_memory import serving_in_memory
from tests.servers.tiny_models import tiny

TEXTS = ["A man is eating food.", "naïve café, 日本語 🙂, and (behind it) a statement!"]
COLBERT, DENSE = "colbert-hf", "bert-mean"


def chunks(client: httpx.Client, size: int = 4, path: str = "/v1/embeddings", **fields: Any) -> Any:
    body = {"input": TEXTS, "late_chunking_params": {"chunk_size": size}, **fields}
    return answer(client, path, **body)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/invocations"])
@pytest.mark.parametrize("kind", [COLBERT, DENSE, "bge-m3"])
def test_the_answer_has_the_form_of_vllm(kind: str, path: str, client_of: ClientOf) -> None:
    client = client_of(kind)
    got = chunks(client, path=path)
    tokens = [len(answer(client, "/tokenize", prompt=text)["tokens"]) + (kind == COLBERT) for text in TEXTS]
    assert got["usage"]["prompt_tokens"] == sum(tokens)
    assert (got["object"], got["model"], got["id"][:5]) == ("list", kind, "embd-")
    for index, (text, row, count) in enumerate(zip(TEXTS, got["data"], tokens, strict=True)):
        assert row.keys() == {"index", "object", "embedding", "late_chunking"}
        assert (row["index"], row["object"]) == (index, "embedding")
        about = row["late_chunking"]
        assert about.keys() == {"chunk_size", "input_tokens", "chunks", "strategy"}
        assert (about["chunk_size"], about["input_tokens"], about["strategy"]) == (4, count, "fixed_tokens")
        starts = range(0, count, 4)
        assert [chunk["token_range"] for chunk in about["chunks"]] == [[at, min(at + 4, count)] for at in starts]
        assert len(row["embedding"]) == len(starts)
        assert_allclose(np.linalg.norm(row["embedding"], axis=1), 1, atol=1e-5)
        ranges = [chunk["char_range"] for chunk in about["chunks"] if chunk["char_range"] is not None]
        assert "".join(text[a:b] for a, b in ranges).replace(" ", "") == text.replace(" ", "")


def test_a_chunk_of_special_tokens_has_no_characters(client_of: ClientOf, tiny_folder: TinyFolder) -> None:
    """The chunks of one token are its vectors. Here those of punctuation are not dropped."""
    row = chunks(client_of(COLBERT), size=1)["data"][0]
    ranges = [chunk["char_range"] for chunk in row["late_chunking"]["chunks"]]
    assert ranges[:2] == [None, None]  # [CLS] and the marker of documents
    assert ranges[-1] is None
    assert None not in ranges[2:-1]
    wanted = stanford_colbert(tiny_folder(COLBERT), TEXTS[0], role="document")
    found = [vector for vector, place in zip(row["embedding"], ranges, strict=True) if place != [20, 21]]
    assert_allclose(found, wanted, atol=2e-5)


def test_vectors_may_keep_their_lengths(client_of: ClientOf) -> None:
    client = client_of(COLBERT)
    raw = np.array(chunks(client, use_activation=False)["data"][0]["embedding"])
    lengths = np.linalg.norm(raw, axis=1, keepdims=True)
    assert np.abs(lengths - 1).max() > 0.01
    assert_allclose(raw / lengths, chunks(client)["data"][0]["embedding"], atol=1e-5)


def test_lines_have_the_chunks_too(client_of: ClientOf) -> None:
    client = client_of(COLBERT)
    body = {"input": TEXTS, "late_chunking_params": {"chunk_size": 4}}
    lines = client.post("/v1/embeddings", json=body, headers={"accept": "application/x-ndjson"}).text.splitlines()
    entries = sorted((line for line in map(json.loads, lines) if "embedding" in line), key=lambda line: line["index"])
    for entry, wanted in zip(entries, chunks(client)["data"], strict=True):
        assert entry["late_chunking"] == wanted["late_chunking"]
        assert_allclose(entry["embedding"], wanted["embedding"], atol=2e-5)


def test_clients_have_one_keyword_for_it(client_of: ClientOf) -> None:
    client = client_of(COLBERT)
    rows = chunks(client)["data"]
    with staged_pool.Client(str(client.base_url), batch_items=1) as ours:
        found = ours.embed(TEXTS, outputs="multi_vector", chunk_tokens=4)
        assert found.multi_vector is not None
        assert found.chunks is not None
        assert found.offsets is not None
        for row, vectors, tokens, characters in zip(rows, found.multi_vector, found.chunks, found.offsets, strict=True):
            about = row["late_chunking"]["chunks"]
            assert_allclose(vectors, row["embedding"], atol=2e-5)
            assert tokens.tolist() == [chunk["token_range"] for chunk in about]
            assert characters is not None
            assert characters.tolist() == [chunk["char_range"] or [0, 0] for chunk in about]
        with pytest.raises(InvalidInput, match="chunk_tokens is for multi_vector alone"):
            ours.embed(TEXTS, chunk_tokens=4)
        with pytest.raises(InvalidInput, match="offsets does not go with chunk_tokens"):
            ours.embed(TEXTS, outputs="multi_vector", chunk_tokens=4, offsets=True)


@pytest.mark.parametrize(
    ("fields", "said", "param"),
    [
        ({"late_chunking_params": {"chunk_size": 0}}, "chunk_size: Expected `int` >= 1", "late_chunking_params"),
        ({"late_chunking_params": {"chunk_size": True}}, "Expected `int`, got `bool`", "late_chunking_params"),
        ({"late_chunking_params": {"chunk_size": "2"}}, "Expected `int`, got `str`", "late_chunking_params"),
        ({"late_chunking_params": {"chunk_size": 2, "overlap": 1}}, "unknown field `overlap`", "late_chunking_params"),
        (
            {"late_chunking_params": {}},
            "late_chunking_params.chunk_size: this field is required",
            "late_chunking_params",
        ),
        ({"late_chunking_params": 5}, "late_chunking_params: ", "late_chunking_params"),
        ({"encoding_format": "base64"}, "Late chunking requires float", "encoding_format"),
        ({"encoding_format": "bytes"}, "Late chunking requires float", "encoding_format"),
        ({"embed_dtype": "float16"}, "Late chunking requires float", "encoding_format"),
        ({"embedding_type": ["float", "int8"]}, "Late chunking requires float", "encoding_format"),
        ({"dimensions": 8}, "Late chunking does not support dimensions", "dimensions"),
        ({"output_dimension": 8}, "Late chunking does not support output_dimension", "output_dimension"),
        ({"input": ["a", ""]}, "Late chunking requires nonempty plain-text input", "input"),
        ({"input": [[5, 6]]}, "Late chunking requires nonempty plain-text input", "input"),
        ({"input": None, "messages": [{"role": "user", "content": "a"}]}, "nonempty plain-text input", "messages"),
        ({"truncate_prompt_tokens": 4}, "does not support input padding, truncation", "truncate_prompt_tokens"),
        ({"truncate": "END"}, "does not support input padding, truncation", "truncate"),
        ({"padding": "max_length"}, "does not support input padding, truncation", "padding"),
        ({"late_chunking": True}, "late_chunking_params or by the texts of late_chunking", "late_chunking_params"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], said: str, param: str, client_of: ClientOf) -> None:
    body = {"input": TEXTS, "late_chunking_params": {"chunk_size": 2}, **fields}
    error = rejection(client_of(DENSE), "/v1/embeddings", 400, **body)["error"]
    assert said in error["message"]
    assert error["param"] == param


def test_models_without_vectors_of_tokens_are_named(client_of: ClientOf) -> None:
    body = {"input": TEXTS, "late_chunking_params": {"chunk_size": 2}}
    error = rejection(client_of("clip"), "/v1/embeddings", 501, **body)["error"]
    assert error["message"].startswith("Late chunking requires token_embed")
    error = rejection(client_of("ce-bert-1label"), "/v1/embeddings", 404, **body)["error"]
    assert error["message"].startswith("No served model gives vectors; served: ")
    error = rejection(client_of(COLBERT), "/pooling", 400, **body)["error"]
    assert error["message"].endswith("/v1/embeddings has `late_chunking_params`")


def test_the_body_decides_which_model_it_is_for(client_of: ClientOf) -> None:
    """Without the field a model of token vectors has nothing for that path."""
    client = client_of(COLBERT)
    error = rejection(client, "/v1/embeddings", 404, input="a")["error"]
    assert error["message"].startswith("No served model gives vectors; served: ")
    rejection(client, "/v1/embeddings", 404, input="a", late_chunking_params=None)
    assert len(answer(client, "/invocations", input="a")["data"][0]["data"][0]) == DIMENSIONS  # as at /pooling
    both = client_of(COLBERT, "clip")
    assert chunks(both)["model"] == COLBERT
    assert len(openai_vectors(both, "a", model="clip")) == 1
    named = rejection(both, "/v1/embeddings", 501, input="a", late_chunking_params={"chunk_size": 2}, model="clip")
    assert "`clip` gives no vectors of tokens" in named["error"]["message"]


@pytest.fixture(scope="session")
def wanted(client_of: ClientOf) -> Any:
    """The answer of the route, which is there before any event loop runs."""
    return chunks(client_of(COLBERT))["data"]


@pytest.mark.anyio
async def test_a_line_of_a_batch_has_the_answer_of_the_route(
    tiny_folder: TinyFolder, wanted: Any, nothing_blocks_the_event_loop: BlockBuster
) -> None:
    nothing_blocks_the_event_loop.deactivate()  # a model's code is imported when it loads
    body = json.dumps({"input": TEXTS, "late_chunking_params": {"chunk_size": 4}}).encode()
    async with serving_in_memory(tiny(tiny_folder(COLBERT))) as served:
        work = BatchWork(served.registry, BatchAnswers("job"), auto_truncate=True)
        (found,) = await work.do([BatchLine(0, "mine", "/v1/embeddings", body)])
        line = json.loads(b"".join(found.pieces()))
    for row, right in zip(line["response"]["body"]["data"], wanted, strict=True):
        assert row["late_chunking"] == right["late_chunking"]
        assert_allclose(row["embedding"], right["embedding"], atol=2e-5)


def test_a_client_names_the_model_that_cannot(client_of: ClientOf) -> None:
    with (
        staged_pool.Client(str(client_of("clip").base_url)) as ours,
        pytest.raises(Unsupported, match="Late chunking requires token_embed"),
    ):
        ours.embed("a", outputs="multi_vector", chunk_tokens=4)
