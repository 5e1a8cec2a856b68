"""Expectations of vLLM's own tests, on real models."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from transformers import AutoTokenizer

from tests.api.wire.test_encodings import BYTE_ORDERS, STEPS, decoded
from tests.dialects.answers import answer, rejection
from tests.dialects.conftest import ClientOf
from tests.models import oracle
from tests.models.conftest import TinyFolder
from tests.models.tiny import WIDTH, edit_json

EMBEDDER = "jina-matryoshka"
TEXTS = ["The statement is executed.", "A module", "What does the operator yield?"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}{% if add_generation_prompt %}say:{% endif %}"
)
MESSAGES = [{"role": "user", "content": "the statement"}, {"role": "assistant", "content": "a module"}]
PAIRS = [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")]


def vectors(got: Any) -> NDArray[np.float32]:
    return np.array([row["embedding"] for row in got["data"]], np.float32)


def cosines(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    lengths = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
    result: NDArray[Any] = (one * other).sum(axis=-1) / lengths
    return result


def test_the_first_model_has_the_served_name(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    [model] = (client.get("/v1/models")).json()["data"]
    assert (model["id"], model["root"]) == (EMBEDDER, EMBEDDER)


def test_all_forms_of_input_have_the_vectors_of_sentence_transformers(
    client_of: ClientOf, tiny_folder: TinyFolder
) -> None:
    folder = tiny_folder(EMBEDDER)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    client = client_of(folder)
    for text, own in zip(TEXTS, ids, strict=True):
        assert (answer(client, "/tokenize", prompt=text))["tokens"] == own
    texts = answer(client, "/v1/embeddings", input=TEXTS)
    for other in (
        [answer(client, "/v1/embeddings", input=text) for text in TEXTS],
        [answer(client, "/v1/embeddings", input=own) for own in ids],
        [answer(client, "/v1/embeddings", input=[{"text": text}]) for text in TEXTS],
    ):
        assert_allclose(np.concatenate([vectors(one) for one in other]), vectors(texts), atol=1e-5)
    assert_allclose(vectors(answer(client, "/embeddings", input=ids)), vectors(texts), atol=1e-5)
    assert_allclose(vectors(texts), oracle.dense(folder, TEXTS), atol=1e-3)
    assert [row["index"] for row in texts["data"]] == [0, 1, 2]
    tokens = sum(map(len, ids))
    assert texts["usage"] == {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def test_long_inputs_are_cut_when_asked_and_else_rejected(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    longest = (client.get("/v1/models")).json()["data"][0]["max_model_len"]
    text = "the statement " * 100
    ids = (answer(client, "/tokenize", prompt=text))["tokens"]
    for given in (text, ids):
        for asked, wanted in ((10, 10), (-1, longest)):
            got = answer(client, "/v1/embeddings", input=given, truncate_prompt_tokens=asked)
            assert got["usage"]["prompt_tokens"] == wanted
        error = (rejection(client, "/v1/embeddings", 400, input=given))["error"]
        assert (error["type"], error["code"]) == ("BadRequestError", 400)
        assert "Please reduce the length of the input prompt" in error["message"]
    ends = text + "An old film about two cats that live by the sea."
    left = answer(client, "/v1/embeddings", input=ends, truncate_prompt_tokens=9, truncation_side="left")
    right = answer(client, "/v1/embeddings", input=ends, truncate_prompt_tokens=9)
    assert cosines(vectors(left), vectors(right))[0] < 0.99
    error = (rejection(client, "/v1/embeddings", 400, input="a", truncate_prompt_tokens=longest + 1))["error"]
    assert error["message"] == (
        "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size."
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": [-1]}, "Token id -1 is out of vocabulary"),
        ({"input": [10**6]}, "Token id 1000000 is out of vocabulary"),
        ({"input": []}, "You must pass at least one prompt"),
        ({"input": [[]]}, "a list of token ids must not be empty"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens: Expected `int` >= -1"),
        ({"input": "a", "normalize": True}, "Parameter `normalize` was removed; use `use_activation` instead."),
        ({"input": "a", "dimensions": 0}, "dimensions: Expected `int` >= 1"),
        (
            {"input": "a", "dimensions": 1000},
            f"Model '{EMBEDDER}' only supports dimensions in range [1, {WIDTH}], got 1000.",
        ),
        (
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
        ),
        ({"messages": MESSAGES, "chat_template": "x"}, "Chat template is passed with request"),
        ({"input": [[5]], "late_chunking": True}, "With late_chunking each input must be a text."),
        ({"input": "a", "cache_salt": ""}, "cache_salt"),
        ({"input": "a", "embed_dtype": "binary", "dimensions": 12}, "binary packs eight values into a byte"),
        ({"input": ["a", {"text": 1}]}, "input[1].text: expected a text"),
        *(
            ({"input": "a", field: "no-such-one"}, f"{field}: Invalid enum value 'no-such-one'")
            for field in ("encoding_format", "embed_dtype", "endianness")
        ),
    ],
)
def test_what_is_wrong_is_said(body: dict[str, Any], said: str, client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    error = (rejection(client, "/v1/embeddings", 400, **body))["error"]
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert said in error["message"]
    assert ("no-such-one" in error["message"]) == ("literal_error" in error["message"])


def test_the_status_of_what_is_wrong_with_a_request_as_a_whole(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    unknown = (rejection(client, "/v1/embeddings", 404, input="a", model="x"))["error"]
    assert unknown["message"].startswith("The model `x` does not exist. Served: ")
    assert unknown["type"] == "NotFoundError"
    text = client.post("/v1/embeddings", content=b'{"input":"a"}', headers={"content-type": "text/plain"})
    assert text.status_code == 415
    message = text.json()["error"]["message"]
    assert message.startswith("Unsupported Media Type: Only 'application/json' is allowed")
    for body in (b"{", b"[]", b"1"):
        wrong = client.post("/v1/embeddings", content=body, headers={"content-type": "application/json"})
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "BadRequestError")
    for path in ("/classify", "/classify_tokens", "/nothing"):
        assert rejection(client, path, 404, input="a")["detail"] == "Not Found"
    for path in ("/predict", "/embed_sparse"):
        assert rejection(client, path, 404, inputs="a")["error"].startswith("No served model gives ")
    assert (client.get("/v1/embeddings")).status_code == 405
    plain = rejection(client, "/pooling", 400, input="a", task="classify")["error"]
    assert (plain["type"], plain["param"]) == ("BadRequestError", "task")
    assert plain["message"].startswith("Unsupported task: 'classify' Supported tasks: (")


def test_weights_of_tokens_go_with_the_ids_of_tokenize(client_of: ClientOf) -> None:
    """The way of vLLM's own test of BGE-M3: ids of `/tokenize` and weights of `/pooling` make lexical weights."""
    client = client_of("bge-m3")
    texts = ["What is BGE M3?", "a text, and a text again", ""]
    rows = answer(client, "/pooling", input=texts, task="token_classify")["data"]
    sparse = answer(client, "/pooling", input=texts, task="sparse")["data"]
    for text, row, wanted in zip(texts, rows, sparse, strict=True):
        ids = answer(client, "/tokenize", prompt=text)["tokens"]
        weights = row["data"]
        assert len(weights) == len(ids) - 2
        largest: dict[int, float] = {}
        for token, weight in zip(ids[1:], weights, strict=False):
            largest[token] = max(weight, largest.get(token, 0.0))
        lexical = dict(zip(wanted["data"]["indices"], wanted["data"]["values"], strict=True))
        assert {token: weight for token, weight in largest.items() if token in lexical} == pytest.approx(
            lexical, abs=1e-5
        )


def test_chats_are_their_rendered_templates(client_of: ClientOf, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tmp_path / "chat"
    shutil.copytree(tiny_folder(EMBEDDER), folder)
    edit_json(folder / "tokenizer_config.json", chat_template=TEMPLATE)
    rendered = "user: the statement assistant: a module "
    client = client_of(folder)
    plain = answer(client, "/v1/embeddings", input=rendered, add_special_tokens=False)
    for same in ({"messages": MESSAGES}, {"input": MESSAGES}, {"input": [MESSAGES]}, {"messages": [MESSAGES]}):
        got = answer(client, "/v1/embeddings", **same)
        assert_allclose(vectors(got), vectors(plain), atol=1e-5)
        assert got["usage"] == plain["usage"]
    tokens = plain["usage"]["prompt_tokens"]
    counts = {}
    for name in ("add_generation_prompt", "continue_final_message", "add_special_tokens"):
        got = answer(client, "/v1/embeddings", messages=MESSAGES, **{name: True})
        counts[name] = got["usage"]["prompt_tokens"]
    begun = answer(client, "/tokenize", prompt=rendered + "say:", add_special_tokens=False)
    assert counts["add_special_tokens"] == tokens + 2
    assert counts["add_generation_prompt"] == begun["count"] > tokens
    assert counts["continue_final_message"] <= tokens


@pytest.mark.parametrize("endianness", BYTE_ORDERS)
def test_vectors_come_as_bytes_of_any_type_and_order(endianness: Any, client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    plain = vectors(answer(client, "/v1/embeddings", input=TEXTS))
    for dtype in STEPS:
        asked: dict[str, Any] = {"input": TEXTS, "embed_dtype": dtype, "endianness": endianness}
        for path, key in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
            got = answer(client, path, **asked, encoding_format="base64")
            for row, wanted in zip(got["data"], plain, strict=True):
                found = decoded(base64.b64decode(row[key]), dtype, endianness)
                assert_allclose(found, wanted, rtol=STEPS[dtype][0] + 1e-3, atol=1e-3)
            framed = client.post(path, json={**asked, "encoding_format": "bytes"})
            bare = client.post(path, json={**asked, "encoding_format": "bytes_only"})
            assert bare.headers["content-type"] == "application/octet-stream"
            assert "metadata" not in bare.headers
            assert bare.content == framed.content
            about = json.loads(framed.headers["metadata"])
            assert about["usage"]["prompt_tokens"] == got["usage"]["prompt_tokens"]
            for entry, row in zip(about["data"], got["data"], strict=True):
                assert (entry["embed_dtype"], entry["endianness"], entry["shape"]) == (dtype, endianness, [WIDTH])
                assert framed.content[entry["start"] : entry["end"]] == base64.b64decode(row[key])


def test_metadata_too_long_for_a_header_stand_before_the_bytes(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    many = client.post("/v1/embeddings", json={"input": ["a"] * 200, "encoding_format": "bytes"})
    [one] = vectors(answer(client, "/v1/embeddings", input="a"))
    assert many.headers["content-type"] == "application/vnd.staged-pool.embeddings"
    assert "metadata" not in many.headers
    length = int.from_bytes(many.content[:4], "little")
    about = json.loads(many.content[4 : 4 + length])
    body = many.content[4 + length :]
    assert len(about["data"]) == 200
    assert about["data"][-1]["end"] == len(body)
    last = np.frombuffer(body[about["data"][-1]["start"] :], np.float32)
    assert_allclose(last, one, atol=1e-5)


def test_the_id_of_the_body_goes_before_that_of_the_header(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    headers = {"x-request-id": "h"}
    named = client.post("/v1/embeddings", json={"input": "a", "request_id": "b"}, headers=headers)
    plain = client.post("/v1/embeddings", json={"input": "a"}, headers=headers)
    assert (named.json()["id"], plain.json()["id"]) == ("embd-b", "embd-h")
    assert named.headers["x-request-id"] == "h"


def test_activation_is_the_default(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    usual, activated, raw = [
        vectors(answer(client, "/v1/embeddings", input=TEXTS, **asked))
        for asked in ({}, {"use_activation": True}, {"use_activation": False})
    ]
    assert_array_equal(usual, activated)
    assert not np.allclose(np.linalg.norm(raw, axis=1), 1)
    assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), usual, atol=1e-5)


def test_labels_are_those_of_the_pipeline(client_of: ClientOf, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("seqcls-multiclass")
    client = client_of(folder)
    usual = answer(client, "/classify", input=TEXTS)
    raw = answer(client, "/classify", input=TEXTS, use_activation=False)
    again = answer(client, "/invocations", input=TEXTS)
    assert rejection(client, "/score", 404, queries="a", documents="b")["detail"] == "Not Found"
    assert rejection(client, "/rerank", 404, query="a", documents=["b"])["detail"] == "Not Found"
    assert rejection(client, "/v1/embeddings", 404, input="a")["detail"] == "Not Found"
    probabilities = np.array([row["probs"] for row in usual["data"]])
    logits = np.array([row["probs"] for row in raw["data"]])
    assert_allclose(probabilities, oracle.labels(folder, TEXTS), atol=1e-5)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    assert_allclose(powers / powers.sum(axis=1, keepdims=True), probabilities, atol=1e-5)
    assert [row["label"] for row in usual["data"]] == [
        ("anger", "joy", "fear", "love")[place] for place in probabilities.argmax(axis=1)
    ]
    assert {**again, "id": "", "created": 0} == {**usual, "id": "", "created": 0}


def test_scores_are_those_of_a_cross_encoder_under_every_name(client_of: ClientOf, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("ce-bert-1label")
    wanted = oracle.scores(folder, [(TEXTS[0], text) for text in TEXTS])
    client = client_of(folder)
    for first, second in PAIRS:
        got = answer(client, "/score", **{first: TEXTS[0], second: TEXTS})
        assert_allclose([row["score"] for row in got["data"]], wanted, rtol=1e-2)
    each = answer(client, "/v1/score", queries=[TEXTS[0]] * 3, documents=TEXTS)
    assert_allclose([row["score"] for row in each["data"]], wanted, rtol=1e-2)
    one = answer(client, "/score", queries=TEXTS[0], documents=TEXTS[1])
    assert_allclose(one["data"][0]["score"], wanted[1], rtol=1e-2)
    raw = answer(client, "/score", queries=TEXTS[0], documents=TEXTS, use_activation=False)
    logits = np.array([row["score"] for row in raw["data"]])
    assert_allclose(1 / (1 + np.exp(-logits)), wanted, rtol=1e-4)
    error = rejection(client, "/score", 400, queries=["a", "b"], documents=["a", "b", "c"])
    assert "Input lengths must be either 1:1, 1:N or N:N" in error["error"]["message"]
    invoked = answer(client, "/invocations", text_1=TEXTS[0], text_2=TEXTS)
    assert invoked["data"] == each["data"] or len(invoked["data"]) == 3


@pytest.mark.parametrize("kind", ["ce-bert-1label", EMBEDDER])
def test_a_ranking_is_sorted_and_cut(kind: str, client_of: ClientOf) -> None:
    client = client_of(kind)
    scores = answer(client, "/score", queries=TEXTS[1], documents=TEXTS)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        got = answer(client, path, query=TEXTS[1], documents=TEXTS)
        found = [entry["relevance_score"] for entry in got["results"]]
        assert found == sorted(found, reverse=True)
        for entry in got["results"]:
            assert entry["document"]["text"] == TEXTS[entry["index"]]
            assert_allclose(entry["relevance_score"], scores["data"][entry["index"]]["score"], atol=1e-5)
        two = answer(client, path, query=TEXTS[1], documents=TEXTS, top_n=2)
        every = answer(client, path, query=TEXTS[1], documents=TEXTS, top_n=0)
        assert [len(each["results"]) for each in (two, every)] == [2, 3]
    whole = answer(client, "/rerank", query=TEXTS[1], documents=TEXTS, max_tokens_per_doc=0)
    short = answer(client, "/rerank", query=TEXTS[1], documents=TEXTS, max_tokens_per_doc=1)
    assert short["usage"]["total_tokens"] < whole["usage"]["total_tokens"] == got["usage"]["total_tokens"]
    rejection(client, "/rerank", 400, query="a", documents=["b"], max_tokens_per_doc=-5)


def test_an_instruction_is_one_of_the_template_too(client_of: ClientOf) -> None:
    client = client_of("ce-qwen3-lm")
    asked = {"query": "a", "documents": ["b"]}
    plain = answer(client, "/rerank", **asked)
    given = answer(client, "/rerank", **asked, instruction="find statements of all kinds, one by one")
    kwargs = {"instruction": "find statements of all kinds, one by one"}
    same = answer(client, "/rerank", **asked, instruction="no", chat_template_kwargs=kwargs)
    assert given["usage"] == same["usage"] != plain["usage"]
    assert given["results"] == same["results"]


def test_token_vectors_and_late_interaction(client_of: ClientOf, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("colbert-st")
    query = oracle.multi_vector(folder, TEXTS[:1], role="query")[0]
    wanted = [oracle.maxsim(query, rows) for rows in oracle.multi_vector(folder, TEXTS, role="document")]
    client = client_of(folder)
    scores = answer(client, "/score", queries=TEXTS[0], documents=TEXTS)
    assert_allclose([row["score"] for row in scores["data"]], wanted, rtol=1e-2)
    plain = answer(client, "/pooling", input=TEXTS, task="token_embed")
    asked = {"input": TEXTS, "task": "token_embed", "encoding_format": "bytes"}
    raw = client.post("/pooling", json=asked)
    about = json.loads(raw.headers["metadata"])["data"]
    for row, entry in zip(plain["data"], about, strict=True):
        matrix = np.array(row["data"], np.float32)
        assert_allclose(np.linalg.norm(matrix, axis=1), 1, atol=1e-4)
        assert entry["shape"] == list(matrix.shape)
        found = np.frombuffer(raw.content[entry["start"] : entry["end"]], np.float32).reshape(matrix.shape)
        assert_allclose(found, matrix, atol=1e-6)


def test_only_models_that_were_trained_for_it_are_cut(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER, "nomic-matryoshka", "bert-mean")
    for model, dimensions in ((EMBEDDER, 5), ("nomic-matryoshka", 16)):
        whole = vectors(answer(client, "/v1/embeddings", input=TEXTS, model=model))
        cut = vectors(answer(client, "/v1/embeddings", input=TEXTS, model=model, dimensions=dimensions))
        assert cut.shape == (3, dimensions)
        assert_allclose(cosines(cut, whole[:, :dimensions]), 1, atol=1e-5)
        assert_allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-5)
    rejection(client, "/v1/embeddings", 400, input="a", model="nomic-matryoshka", dimensions=5)
    rejection(client, "/v1/embeddings", 400, input="a", model="bert-mean", dimensions=5)
    answer(client, "/v1/embeddings", input="a", model="bert-mean", dimensions=WIDTH)


def test_long_texts_have_a_vector_of_length_1_when_they_are_split(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER, split_long_inputs=True)
    got = answer(client, "/v1/embeddings", input="the statement of a module " * 300)
    [vector] = vectors(got)
    assert got["usage"]["prompt_tokens"] > 800
    assert_allclose(np.linalg.norm(vector), 1, atol=1e-5)
