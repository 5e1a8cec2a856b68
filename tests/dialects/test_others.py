"""Requests of clients of Cohere, Jina, text-embeddings-inference and Infinity, on real models."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from transformers import AutoTokenizer

import staged_pool
from tests.dialects.answers import answer, openai_vectors, rejection
from tests.dialects.conftest import ClientOf
from tests.models import oracle
from tests.models.conftest import TinyFolder
from tests.models.tiny import WIDTH

EMBEDDER = "jina-matryoshka"
PROMPTED = "nomic-matryoshka"
TEXTS = ["The statement is executed.", "A module", "What does the operator yield?"]
LONG = "the statement yields a module " * 60
END = "what is the name of an operator, or of a number? " * 8


@pytest.mark.parametrize("path", ["/v1/embed", "/v2/embed"])
def test_cohere_gets_vectors_by_their_types(path: str, client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    plain = openai_vectors(client, TEXTS)
    types = ["float", "float32", "float16", "bfloat16", "int8", "uint8", "binary", "ubinary", "base64"]
    got = answer(client, path, texts=TEXTS, model=EMBEDDER, embedding_types=types, input_type="search_document")
    assert set(got) == {"id", "embeddings", "texts", "meta", "response_type"}
    assert (got["texts"], got["response_type"]) == (TEXTS, "embeddings_by_type")
    assert got["meta"]["api_version"] == {"version": path[2]}
    assert got["meta"]["billed_units"] == {
        "input_tokens": answer(client, "/v1/embeddings", input=TEXTS)["usage"]["prompt_tokens"]
    }
    vectors = {name: got["embeddings"][name] for name in types}
    assert_allclose(vectors["float"], plain, atol=1e-5)
    assert vectors["float32"] == vectors["float"]
    halves = np.array(vectors["float16"], np.float32)
    assert_array_equal(halves, np.array(vectors["float"], np.float16).astype(np.float32))
    bits = np.array(vectors["bfloat16"], np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    assert_allclose(bits.view(np.float32), plain, rtol=2**-8, atol=1e-5)
    assert_allclose([np.frombuffer(base64.b64decode(row), "<f4") for row in vectors["base64"]], plain, atol=1e-5)
    for name, zero in (("int8", 0), ("uint8", 128)):
        whole = np.array(vectors[name], np.float32) - zero
        assert_allclose(whole * np.abs(plain).max(axis=1, keepdims=True) / 127, plain, atol=1e-2)
    bits = plain >= 0
    assert_array_equal(np.unpackbits(np.array(vectors["ubinary"], np.uint8), axis=1), bits)
    assert_array_equal(np.array(vectors["binary"]) + 128, vectors["ubinary"])
    assert np.array(vectors["binary"]).shape == (3, WIDTH // 8)


def test_coheres_two_versions_have_the_same_vectors(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    first = answer(client, "/v1/embed", texts=TEXTS)
    second = answer(client, "/v2/embed", texts=TEXTS)
    inputs = answer(client, "/v2/embed", inputs=[{"content": [{"type": "text", "text": text}]} for text in TEXTS])
    cut = answer(client, "/v2/embed", texts=TEXTS, output_dimension=8)
    assert first["response_type"] == "embeddings_floats"
    assert_allclose(first["embeddings"], second["embeddings"]["float"], atol=1e-5)
    assert_allclose(inputs["embeddings"]["float"], second["embeddings"]["float"], atol=1e-5)
    assert "texts" not in inputs
    assert_allclose(np.linalg.norm(first["embeddings"], axis=1), 1, atol=0.01)
    assert_allclose(np.linalg.norm(cut["embeddings"]["float"], axis=1), 1, atol=0.01)
    assert np.array(cut["embeddings"]["float"]).shape == (3, 8)


def test_coheres_input_types_are_prompts(client_of: ClientOf) -> None:
    client = client_of(PROMPTED)
    for given, own in (("search_query", "query"), ("search_document", "document"), ("clustering", "clustering")):
        found = answer(client, "/v2/embed", texts=TEXTS, input_type=given)["embeddings"]["float"]
        assert_allclose(found, openai_vectors(client, TEXTS, prompt_name=own), atol=1e-5)
    error = rejection(client, "/v2/embed", 400, texts=TEXTS, input_type="no-such")["error"]
    assert error["message"].startswith(
        "Unsupported input_type 'no-such'. Supported values: query, document, clustering"
    )


def test_cohere_cuts_either_end_or_rejects(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    limit = answer(client, "/tokenize", prompt="a")["max_model_len"]
    end, start, usual = [
        answer(client, "/v2/embed", texts=[LONG + END], **asked)
        for asked in ({"truncate": "END"}, {"truncate": "START"}, {})
    ]
    assert end["meta"]["billed_units"]["input_tokens"] == limit
    [one], [other] = end["embeddings"]["float"], start["embeddings"]["float"]
    assert float(np.dot(one, other)) < 0.99
    assert usual["embeddings"] == end["embeddings"]
    rejection(client, "/v2/embed", 400, texts=["a", LONG], truncate="NONE")
    few = answer(client, "/v2/embed", texts=[LONG], max_tokens=7)
    assert few["meta"]["billed_units"]["input_tokens"] == 7
    error = rejection(client, "/v2/embed", 400, texts=["a", LONG], truncate="NONE", max_tokens=7)["error"]
    assert error["index"] == 1
    assert "more than 7 tokens" in error["message"]


@pytest.mark.parametrize("body", [{}, {"texts": []}, {"texts": ["a"], "images": ["data:,"]}])
def test_cohere_is_told_that_one_kind_of_input_is_needed(body: dict[str, Any], client_of: ClientOf) -> None:
    error = rejection(client_of(EMBEDDER), "/v2/embed", 400, **body)["error"]
    assert error["message"] == "Exactly one of texts, images, or inputs must be provided, and it must be non-empty"


@pytest.mark.parametrize(
    ("path", "kind", "version"), [("/rerank", "rerank", "1"), ("/v1/rerank", "list", "1"), ("/v2/rerank", "list", "2")]
)
def test_one_ranking_has_the_fields_of_all(path: str, kind: str, version: str, client_of: ClientOf) -> None:
    client = client_of("ce-bert-1label")
    documents = [TEXTS[0], {"text": TEXTS[1]}]
    got = answer(client, path, query=TEXTS[2], documents=documents, model="ce-bert-1label")
    assert (got["object"], got["meta"]["api_version"]["version"]) == (kind, version)
    assert got["meta"]["billed_units"] == {"search_units": 1}
    assert got["usage"]["total_tokens"] > 0
    assert {entry["index"]: entry["document"]["text"] for entry in got["results"]} == dict(enumerate(TEXTS[:2]))
    bare = answer(client, path, query=TEXTS[2], documents=documents, return_documents=False)
    assert not any("document" in entry for entry in bare["results"])
    raw = answer(client, path, query=TEXTS[2], documents=documents, raw_scores=True)
    for one, other in zip(raw["results"], got["results"], strict=True):
        assert_allclose(1 / (1 + np.exp(-one["relevance_score"])), other["relevance_score"], rtol=1e-4)


def test_jinas_fields(client_of: ClientOf) -> None:
    client = client_of(PROMPTED)
    asked: list[Any] = [{"text": TEXTS[0]}, TEXTS[1]]
    for task, own in (("retrieval.query", "query"), ("retrieval.passage", "document"), ("clustering", "clustering")):
        found = openai_vectors(client, asked, task=task)
        assert_allclose(found, openai_vectors(client, TEXTS[:2], prompt_name=own), atol=1e-5)
    assert_allclose(openai_vectors(client, asked, task="text-matching"), openai_vectors(client, TEXTS[:2]), atol=1e-5)
    raw = openai_vectors(client, TEXTS, normalized=False)
    assert_array_equal(raw, openai_vectors(client, TEXTS, use_activation=False))
    several = answer(client, "/v1/embeddings", input=TEXTS, embedding_type=["float", "ubinary"])
    for row, wanted in zip(several["data"], openai_vectors(client, TEXTS), strict=True):
        assert_allclose(row["embedding"]["float"], wanted, atol=1e-5)
        assert_array_equal(np.unpackbits(np.array(row["embedding"]["ubinary"], np.uint8)), wanted >= 0)
    single = answer(client, "/v1/embeddings", input=TEXTS, embedding_type="binary")
    assert len(single["data"][0]["embedding"]) == WIDTH // 8
    assert rejection(client, "/v1/embeddings", 400, input="a", task="no-such")["error"]["param"] == "task"


def test_jinas_late_chunking(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    chunks = [text + " " for text in TEXTS]
    found = openai_vectors(client, chunks, late_chunking=True, task="retrieval.passage")
    with staged_pool.Client(str(client.base_url), batch_items=2) as ours:
        assert_allclose(ours.embed(chunks, late_chunking=True).embeddings, found, atol=1e-6)
    assert np.abs(found - openai_vectors(client, chunks)).max(axis=1).min() > 0.01
    assert_allclose(openai_vectors(client, chunks[0], late_chunking=True), openai_vectors(client, chunks[0]), atol=1e-5)
    body = {"input": chunks, "late_chunking": True, "encoding_format": "float"}
    lines = client.post("/v1/embeddings", json=body, headers={"accept": "application/x-ndjson"}).text.splitlines()
    entries = [line for line in map(json.loads, lines) if "embedding" in line]
    assert [entry["index"] for entry in entries] == [0, 1, 2]
    assert_allclose([entry["embedding"] for entry in entries], found, atol=1e-6)
    error = rejection(client, "/v1/embeddings", 400, input=["a", ""], late_chunking=True)["error"]
    assert error["message"] == "input[1]: With late_chunking an input must not be empty."
    error = rejection(client, "/v1/embeddings", 400, input=["a", "\n"], late_chunking=True)["error"]
    assert "of the document has no token that ends in it" in error["message"]
    assert error["param"] == "input"


def test_characters_of_tokens(client_of: ClientOf) -> None:
    client = client_of("colbert-st")
    text = "The statement is executed."
    [first] = answer(client, "/pooling", input=text, task="token_embed", return_offsets=True)["data"]
    assert [text[a:b] for a, b in first["offsets"] if a < b][:2] == ["The", "statement"]
    assert len(first["offsets"]) == len(first["data"])
    [ids] = answer(client, "/pooling", input=[[5, 6]], task=["token_embed"], return_offsets=True)["data"]
    assert ids["offsets"] == {"token_embed": None}
    with staged_pool.Client(str(client.base_url)) as ours:
        found = ours.embed([text, [5, 6]], outputs="multi_vector", offsets=True).offsets
    assert found is not None
    assert_array_equal(found[0], first["offsets"])
    assert found[1] is None
    labelled = client_of("tokcls-ner")
    got = answer(labelled, "/pooling", input=[text], task="token_classify", return_offsets=True)["data"][0]
    assert len(got["offsets"]) == len(got["data"])
    assert "".join(text[a:b] for a, b in got["offsets"]) == text.replace(" ", "")
    for fields in ({"task": "embed"}, {"task": "token_embed", "encoding_format": "bytes"}):
        server = client if fields["task"] == "token_embed" else client_of(EMBEDDER)
        error = rejection(server, "/pooling", 400, input=text, return_offsets=True, **fields)["error"]
        assert error["param"] == "return_offsets"


def test_teis_vectors(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    plain = openai_vectors(client, TEXTS)
    assert_allclose(answer(client, "/embed", inputs=TEXTS), plain, atol=1e-5)
    assert_allclose(answer(client, "/embed", inputs=TEXTS[0]), plain[:1], atol=1e-5)
    ids = [answer(client, "/tokenize", prompt=text)["tokens"] for text in TEXTS]
    assert_allclose(answer(client, "/embed", inputs=ids), plain, atol=1e-5)
    assert_allclose(answer(client, "/embed", inputs=ids[0]), plain[:1], atol=1e-5)
    raw = np.array(answer(client, "/embed", inputs=TEXTS, normalize=False))
    assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), plain, atol=1e-5)
    assert np.array(answer(client, "/embed", inputs=TEXTS, dimensions=8)).shape == (3, 8)
    every = answer(client, "/embed_all", inputs=TEXTS)
    assert [len(rows) for rows in every] == [len(own) for own in ids]
    similar = answer(client, "/similarity", inputs={"source_sentence": TEXTS[0], "sentences": TEXTS})
    assert_allclose(similar, plain @ plain[0], atol=1e-5)


def test_teis_sparse_vectors(client_of: ClientOf, tiny_folder: TinyFolder) -> None:
    found = answer(client_of("splade-bert"), "/embed_sparse", inputs=TEXTS)
    for row, wanted in zip(found, oracle.sparse(tiny_folder("splade-bert"), TEXTS), strict=True):
        assert {entry["index"] for entry in row} == set(wanted)
        assert_allclose(
            [entry["value"] for entry in row], [wanted[entry["index"]] for entry in row], rtol=1e-3, atol=1e-6
        )


def test_the_largest_weights(client_of: ClientOf, tiny_folder: TinyFolder) -> None:
    client, wanted = client_of("splade-bert"), oracle.sparse(tiny_folder("splade-bert"), TEXTS, max_active_dims=3)
    rows = [row["data"] for row in answer(client, "/pooling", input=TEXTS, max_active_dims=3)["data"]]
    found = answer(client, "/embed_sparse", inputs=TEXTS, max_active_dims=3)
    with staged_pool.Client(str(client.base_url)) as ours:
        sparse = ours.embed(TEXTS, outputs="sparse", max_active_dims=3).sparse or ()
        with pytest.raises(staged_pool.InvalidInput, match="max_active_dims is for sparse vectors"):
            ours.embed(TEXTS, max_active_dims=3)
    for largest, row, entries, vector in zip(wanted, rows, found, sparse, strict=True):
        assert dict(zip(row["indices"], row["values"], strict=True)) == pytest.approx(largest, rel=1e-3)
        assert {entry["index"]: entry["value"] for entry in entries} == pytest.approx(largest, rel=1e-3)
        assert vector.indices.tolist() == row["indices"]
    for wrong in (0, -1, "3"):
        error = rejection(client, "/pooling", 400, input="a", max_active_dims=wrong)["error"]
        assert error["message"].startswith("max_active_dims: Expected `int")
        assert rejection(client, "/embed_sparse", 422, inputs="a", max_active_dims=wrong)["error_type"] == "Validation"
    for kind in ("seqcls-multiclass", EMBEDDER):
        error = rejection(client_of(kind), "/pooling", 400, input="a", max_active_dims=3)["error"]
        assert (error["message"], error["param"]) == ("max_active_dims: only for the task sparse", "max_active_dims")
    error = rejection(client_of(EMBEDDER), "/embed", 422, inputs="a", max_active_dims=3)["error"]
    assert error.startswith("max_active_dims is for sparse vectors")


def test_teis_predictions(client_of: ClientOf, tiny_folder: TinyFolder) -> None:
    client = client_of("seqcls-multiclass")
    wanted = oracle.labels(tiny_folder("seqcls-multiclass"), TEXTS)
    many = answer(client, "/predict", inputs=[[text] for text in TEXTS])
    for row, scores in zip(many, wanted, strict=True):
        assert [entry["score"] for entry in row] == sorted((entry["score"] for entry in row), reverse=True)
        assert_allclose(row[0]["score"], scores.max(), atol=1e-5)
    assert answer(client, "/predict", inputs=TEXTS[0]) == answer(client, "/predict", inputs=TEXTS[:1])
    raw = answer(client, "/predict", inputs=TEXTS[0], raw_scores=True)
    assert [entry["label"] for entry in raw] == [entry["label"] for entry in many[0]]
    pairs = answer(client_of("ce-nli-3label"), "/predict", inputs=[TEXTS[:2], TEXTS[1:]])
    one = answer(client_of("ce-nli-3label"), "/predict", inputs=TEXTS[:2])
    assert_allclose([entry["score"] for entry in pairs[0]], [entry["score"] for entry in one], atol=1e-5)
    assert len(pairs) == 2
    wrongs: list[Any] = [[["a", "b", "c"]], [[]], ["a", ["b"]], [["a"], "b"]]
    for wrong in wrongs:
        assert rejection(client, "/predict", 422, inputs=wrong)["error_type"] == "Validation"


def rounded(labels: Any) -> Any:
    """Round the scores of an answer: in another batch, their last digits differ."""
    if isinstance(labels, dict):
        return labels["label"], pytest.approx(labels["score"], abs=1e-5)
    return [rounded(each) for each in labels]


def test_predictions_of_the_hub_are_a_list_for_each_text(client_of: ClientOf) -> None:
    """The hub's client always sends `parameters`, and those of text-embeddings-inference never do."""
    client = client_of("seqcls-multiclass")

    def ask(path: str, **body: Any) -> Any:
        return [
            [(each["label"], each["score"]) for each in row] if isinstance(row, list) else (row["label"], row["score"])
            for row in answer(client, path, **body)
        ]

    plain = rounded(answer(client, "/predict", inputs=[[text] for text in TEXTS]))
    for parameters in ({}, {"top_k": None, "function_to_apply": None}, {"top_k": 1000}, {"other": 1}):
        for path in ("/predict", "/"):
            assert ask(path, inputs=TEXTS[0], parameters=parameters) == plain[:1]
            assert ask(path, inputs=TEXTS, parameters=parameters) == plain
        assert ask("/invocations", inputs=TEXTS[0], parameters=parameters) == plain[0]
        assert ask("/invocations", inputs=TEXTS, parameters=parameters) == plain
    assert ask("/predict", inputs=TEXTS[0], parameters=None) == plain[0]
    assert ask("/predict", inputs=TEXTS, parameters={"top_k": 1}) == [row[:1] for row in plain]
    raw = rounded(answer(client, "/predict", inputs=TEXTS[0], raw_scores=True))
    assert ask("/predict", inputs=TEXTS[0], parameters={"function_to_apply": "none"}) == [raw]


def test_pairs_have_parameters_too(client_of: ClientOf) -> None:
    client, pairs = client_of("ce-nli-3label"), [TEXTS[:2], TEXTS[1:3]]
    plain = answer(client, "/predict", inputs=pairs)
    found = answer(client, "/predict", inputs=pairs, parameters={"top_k": 2})
    assert [[each["label"] for each in row] for row in found] == [[each["label"] for each in row[:2]] for row in plain]


def test_wrong_parameters_of_predictions_are_named(client_of: ClientOf) -> None:
    client = client_of("ce-nli-3label")
    labels = {"candidate_labels": ["food", "music"]}
    for parameters, message in (
        ({"top_k": 0}, "parameters.top_k: Expected `int` >= 1"),
        ({"top_k": "2"}, "parameters.top_k: Expected `int | null`, got `str`"),
        ({"function_to_apply": "relu"}, "parameters.function_to_apply: Invalid enum value 'relu'"),
        ({"function_to_apply": "softmax", **labels}, "parameters.function_to_apply: is for the model's own labels"),
        ([], "parameters: Expected `object | null`, got `array`"),
    ):
        error = rejection(client, "/predict", 422, inputs="a", parameters=parameters)
        assert error["error"].startswith(message), error
    assert len(answer(client, "/predict", inputs="a", parameters={"top_k": 1, **labels})) == 1


def test_teis_ranking_shares_the_path(client_of: ClientOf) -> None:
    client = client_of("ce-bert-1label")
    got = client.post("/rerank", json={"query": TEXTS[0], "texts": TEXTS, "return_text": True})
    assert [entry["score"] for entry in got.json()] == sorted((entry["score"] for entry in got.json()), reverse=True)
    assert all(entry["text"] == TEXTS[entry["index"]] for entry in got.json())
    for name in ("total", "tokenization", "queue", "inference"):
        assert int(got.headers[f"x-{name}-time"]) >= 0
    assert int(got.headers["x-compute-tokens"]) > 0
    assert "server-timing" in got.headers
    bare = answer(client, "/rerank", query=TEXTS[0], texts=TEXTS, raw_scores=True)
    assert [set(entry) for entry in bare] == [{"index", "score"}] * 3
    assert rejection(client, "/rerank", 422, query=1, texts=TEXTS)["error_type"] == "Validation"
    assert rejection(client, "/rerank", 400, query="a", texts=[])["error_type"] == "Empty"
    assert rejection(client, "/rerank", 400, query=1, documents=TEXTS)["error"]["param"] == "query"


def test_tei_cuts_what_is_too_long_unless_told_not_to(client_of: ClientOf) -> None:
    cutting, keeping = client_of(EMBEDDER), client_of(EMBEDDER, auto_truncate=False)
    limit = answer(cutting, "/tokenize", prompt="a")["max_model_len"]
    usual = cutting.post("/embed", json={"inputs": LONG})
    assert usual.headers["x-compute-tokens"] == str(limit)
    assert rejection(cutting, "/embed", 422, inputs=LONG, truncate=False)["error_type"] == "Validation"
    assert rejection(keeping, "/embed", 422, inputs=LONG)["error_type"] == "Validation"
    assert_allclose(answer(keeping, "/embed", inputs=LONG, truncate=True), usual.json(), atol=1e-6)
    left = answer(cutting, "/embed", inputs=LONG + END, truncation_direction="Left")
    assert answer(cutting, "/embed", inputs=LONG + END, truncation_direction="left") == left
    assert np.dot(left[0], usual.json()[0]) < 0.99


def test_teis_tokens(client_of: ClientOf, tiny_folder: TinyFolder) -> None:
    client = client_of(EMBEDDER)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder(EMBEDDER))
    [first, second] = answer(client, "/tokenize", inputs=TEXTS[:2])
    for text, tokens in zip(TEXTS, (first, second), strict=False):
        assert [token["id"] for token in tokens] == tokenizer(text)["input_ids"]
        assert tokens[0] | {"id": 0} == {"id": 0, "text": "<s>", "special": True, "start": None, "stop": None}
        for token in tokens[1:-1]:
            assert token["text"] == text[token["start"] : token["stop"]]
    bare = answer(client, "/tokenize", inputs=TEXTS[0], add_special_tokens=False)
    assert [token["id"] for token in bare[0]] == [token["id"] for token in first[1:-1]]
    ids = [token["id"] for token in first]
    assert answer(client, "/decode", ids=ids) == [tokenizer.decode(ids, skip_special_tokens=True)]
    assert answer(client, "/decode", ids=[ids, ids], skip_special_tokens=False) == [tokenizer.decode(ids)] * 2
    assert rejection(client, "/tokenize", 400, inputs=[])["error_type"] == "Empty"
    assert rejection(client, "/tokenize", 422, inputs=[1])["error_type"] == "Validation"
    assert rejection(client, "/decode", 422, ids=[[10**6]])["error_type"] == "Validation"


@pytest.mark.parametrize(
    ("kind", "type_"), [(EMBEDDER, "embedding"), ("ce-bert-1label", "reranker"), ("seqcls-multiclass", "classifier")]
)
def test_teis_info(kind: str, type_: str, client_of: ClientOf) -> None:
    got = client_of(kind).get("/info").json()
    assert got["served_model_name"] == kind
    assert (got["model_id"], list(got["model_type"]), got["version"]) == (kind, [type_], staged_pool.__version__)
    assert got["auto_truncate"] is True
    assert got["max_input_length"] > 0


@pytest.mark.parametrize(
    ("path", "status", "kind", "body"),
    [
        ("/embed", 400, "Empty", {"inputs": []}),
        ("/embed", 422, "Validation", {}),
        ("/embed", 422, "Validation", {"inputs": 1}),
        ("/embed", 422, "Validation", {"inputs": "a", "truncation_direction": "up"}),
        ("/embed", 422, "Validation", {"inputs": "a", "prompt_name": "x"}),
        ("/embed", 422, "Validation", {"inputs": [[1], [10**6]]}),
        ("/embed", 413, "Validation", {"inputs": ["a"] * 3000}),
        ("/similarity", 400, "Empty", {"inputs": {"source_sentence": "a", "sentences": []}}),
    ],
)
def test_teis_errors(path: str, status: int, kind: str, body: dict[str, Any], client_of: ClientOf) -> None:
    error = rejection(client_of(EMBEDDER), path, status, **body)
    assert set(error) == {"error", "error_type"}
    assert error["error_type"] == kind


def test_infinitys_labels_and_models(client_of: ClientOf) -> None:
    client = client_of("seqcls-multiclass", EMBEDDER)
    got = answer(client, "/classify", input=TEXTS, raw_scores=False)
    assert got["object"] == "classify"
    tei = answer(client, "/predict", inputs=[[text] for text in TEXTS])
    for mine, other in zip(got["data"], tei, strict=True):
        assert [entry["label"] for entry in mine] == [entry["label"] for entry in other]
        assert_allclose([entry["score"] for entry in mine], [entry["score"] for entry in other], atol=1e-5)
    assert got["usage"]["total_tokens"] == got["usage"]["prompt_tokens"] > 0
    models = client.get("/models").json()["data"]
    assert [(model["id"], model["capabilities"]) for model in models] == [
        ("seqcls-multiclass", ["classify"]),
        (EMBEDDER, ["embed", "rerank"]),
    ]
    assert set(models[0]["stats"]) == {"queue_fraction", "queue_absolute", "results_pending"}
    rejection(client, "/embeddings", 400, input="a", modality="audio", model=EMBEDDER)


def test_of_several_models_the_one_that_is_named_must_be_able(client_of: ClientOf) -> None:
    client = client_of("seqcls-multiclass", EMBEDDER)
    error = rejection(client, "/v2/embed", 501, texts=["a"], model="seqcls-multiclass")["error"]
    assert error["type"] == "NotImplementedError"
    assert error["message"] == (
        "The model does not support Embeddings API: `seqcls-multiclass` gives no vectors; "
        f"served: seqcls-multiclass (classify), {EMBEDDER} (embed, token_embed, score)"
    )
    assert answer(client, "/v2/embed", texts=["a"])["response_type"] == "embeddings_by_type"
    assert rejection(client, "/classify_tokens", 404, input="a", model=EMBEDDER)["detail"] == "Not Found"
