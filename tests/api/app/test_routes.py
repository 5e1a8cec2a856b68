"""Every route of a task on a real engine with known answers, without sockets."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import ArrayLike, NDArray

import staged_pool
from staged_pool.api.app.dialects import OLLAMA_PATHS, TEI_PATHS, WEAVIATE_PATHS
from staged_pool.api.app.tasks import TASKS
from staged_pool.api.status import Problem
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.requests import MODEL_MAX, Output, PairInput
from tests.servers.in_memory import serving_in_memory
from tests.support.cards import CARD, CLASSIFIER, CROSS_ENCODER, EMBEDDER, TAGGER
from tests.support.gates import Gate
from tests.support.model import (
    LetterModel,
    expected,
    label_logits,
    letter_counts,
    pair_logit,
    token_logits,
    token_vectors,
)

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning"),  # the client's own, on trio
]

SCORE_ROUTES = ["/score", "/v1/score"]
RERANK_ROUTES = ["/rerank", "/v1/rerank", "/v2/rerank"]
CHAT = [{"role": "user", "content": "hi"}]


async def ask(card: ModelCard, route: str, **body: Any) -> httpx.Response:
    async with serving_in_memory(LetterModel(card)) as served, served.client() as client:
        return await client.post(route, json=body, headers={"x-request-id": "r"})


async def answer(card: ModelCard, route: str, **body: Any) -> Any:
    response = await ask(card, route, **body)
    assert response.status_code == 200, response.text
    return response.json()


def error_of(response: httpx.Response, status: int) -> Any:
    assert response.status_code == status, response.text
    return response.json()["error"]


def unit(vectors: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(vectors, np.float64)
    result: NDArray[np.float64] = array / np.linalg.norm(array, axis=-1, keepdims=True)
    return result


def softmax(logits: ArrayLike) -> NDArray[np.float64]:
    powers = np.exp(np.asarray(logits, np.float64))
    result: NDArray[np.float64] = powers / powers.sum(axis=-1, keepdims=True)
    return result


def sigmoid(logit: float) -> float:
    return float(1 / (1 + np.exp(-logit)))


def usage(tokens: int) -> dict[str, int | None]:
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


async def test_a_prompt_of_the_model_goes_before_each_text_under_either_name() -> None:
    for field in ("input_type", "prompt_name"):
        got = await answer(EMBEDDER, "/v1/embeddings", input=["a"], **{field: "query"})
        assert got["data"][0]["embedding"] == expected("q:a").tolist()
    got = await answer(EMBEDDER, "/v1/embeddings", input=["a"], prompt="x")
    assert got["data"][0]["embedding"] == expected("xa").tolist()


async def test_an_unknown_prompt_is_rejected_with_the_known_ones() -> None:
    error = error_of(await ask(EMBEDDER, "/v1/embeddings", input="a", prompt_name="other"), 400)
    assert error["message"] == "prompt_name is not one of the model's prompts: 'query', 'passage'."


@pytest.mark.parametrize("field", ["messages", "input"])
async def test_a_conversation_is_one_input_and_a_list_of_them_is_many(field: str) -> None:
    one = await answer(EMBEDDER, "/v1/embeddings", **{field: CHAT}, add_generation_prompt=True)
    two = await answer(EMBEDDER, "/v1/embeddings", **{field: [CHAT, CHAT + CHAT]})
    assert [row["embedding"] for row in one["data"]] == [expected("<user>hi<assistant>").tolist()]
    assert [row["embedding"] for row in two["data"]] == [
        expected("<user>hi").tolist(),
        expected("<user>hi<user>hi").tolist(),
    ]


async def test_shorter_vectors_are_for_models_that_were_trained_for_them() -> None:
    got = await answer(EMBEDDER, "/v1/embeddings", input="a", dimensions=2)
    assert len(got["data"][0]["embedding"]) == 2
    error = error_of(await ask(replace(EMBEDDER, matryoshka=False), "/v1/embeddings", input="a", dimensions=2), 400)
    assert error["param"] == "dimensions"


@pytest.mark.parametrize("task", ["embed", None])
async def test_pooling_gives_vectors_by_default(task: str | None) -> None:
    got = await answer(EMBEDDER, "/pooling", input=["a", "bc"], task=task)
    assert {name: got[name] for name in ("id", "object", "model")} == {
        "id": "pooling-r",
        "object": "list",
        "model": "letters",
    }
    assert got["data"] == [
        {"index": index, "object": "pooling", "data": expected(text).tolist()} for index, text in enumerate(["a", "bc"])
    ]
    assert got["usage"] == usage(3)


async def test_pooling_gives_a_vector_for_each_token() -> None:
    got = await answer(EMBEDDER, "/pooling", input="abc", task="token_embed")
    assert_allclose(got["data"][0]["data"], unit(token_vectors("abc")), rtol=1e-6)
    raw = await answer(EMBEDDER, "/pooling", input="abc", task="token_embed", use_activation=False)
    assert raw["data"][0]["data"] == token_vectors("abc")


async def test_pooling_gives_sparse_vectors() -> None:
    got = await answer(EMBEDDER, "/pooling", input="abba!", task="sparse")
    counts = letter_counts("abba!")
    assert got["data"][0]["data"] == {"indices": counts.indices.tolist(), "values": counts.values.tolist()}


async def test_pooling_gives_several_outputs_of_one_forward_by_name() -> None:
    model = LetterModel(EMBEDDER)
    async with serving_in_memory(model) as served, served.client() as client:
        response = await client.post("/pooling", json={"input": ["ab"], "task": ["embed", "sparse", "token_embed"]})
    [item] = response.json()["data"]
    assert set(item["data"]) == {"embed", "sparse", "token_embed"}
    assert item["data"]["embed"] == expected("ab").tolist()
    assert item["data"]["sparse"] == {"indices": [97, 98], "values": [1.0, 1.0]}
    assert len(item["data"]["token_embed"]) == 2
    assert len(model.given) == 1


async def test_pooling_encodes_in_base64() -> None:
    got = await answer(
        EMBEDDER, "/pooling", input="ab", task=["embed", "sparse", "token_embed"], encoding_format="base64"
    )
    data = got["data"][0]["data"]
    assert_array_equal(np.frombuffer(base64.b64decode(data["embed"]), "<f4"), expected("ab"))
    assert_array_equal(np.frombuffer(base64.b64decode(data["sparse"]["indices"]), "<i4"), [97, 98])
    assert_array_equal(np.frombuffer(base64.b64decode(data["sparse"]["values"]), "<f4"), [1, 1])
    tokens = np.frombuffer(base64.b64decode(data["token_embed"]), "<f4").reshape(2, 2)
    assert_allclose(tokens, unit(token_vectors("ab")), rtol=1e-6)


async def test_pooling_of_a_classifier_gives_its_scores() -> None:
    for task in (None, "classify"):
        got = await answer(CLASSIFIER, "/pooling", input="abb", task=task)
        assert_allclose(got["data"][0]["data"], softmax(label_logits("abb")), rtol=1e-5)


async def test_classify_gives_the_likeliest_label_and_the_scores_of_all() -> None:
    got = await answer(CLASSIFIER, "/classify", input=["abb", "ccc"])
    assert got["id"] == "classify-r"
    assert [(row["index"], row["label"], row["num_classes"]) for row in got["data"]] == [(0, "b", 3), (1, "c", 3)]
    for row, text in zip(got["data"], ["abb", "ccc"], strict=True):
        assert_allclose(row["probs"], softmax(label_logits(text)), rtol=1e-5)
    assert got["usage"] == usage(6)


async def test_classify_gives_logits_if_asked() -> None:
    got = await answer(CLASSIFIER, "/classify", input="abb", use_activation=False)
    assert got["data"][0]["probs"] == label_logits("abb")


async def test_classify_reads_conversations_and_pairs() -> None:
    chat = await answer(CLASSIFIER, "/classify", messages=[{"role": "c", "content": "c"}], use_activation=False)
    assert chat["data"][0]["probs"] == label_logits("<c>c")
    pairs = await answer(CLASSIFIER, "/classify", input=[["a", "bb"], ["c", "c"]], use_activation=False)
    assert [row["probs"] for row in pairs["data"]] == [label_logits("abb"), label_logits("cc")]


async def test_labels_without_names_are_null() -> None:
    got = await answer(replace(CLASSIFIER, labels=()), "/classify", input="a")
    assert got["data"][0]["label"] is None


@pytest.mark.parametrize("route", SCORE_ROUTES)
async def test_a_cross_encoder_scores_pairs(route: str) -> None:
    got = await answer(CROSS_ENCODER, route, queries="abc", documents=["ax", "bca", "y"])
    assert (got["id"], got["object"], got["model"]) == ("score-r", "list", "letters")
    assert [(row["index"], row["object"]) for row in got["data"]] == [(0, "score"), (1, "score"), (2, "score")]
    expected_scores = [sigmoid(pair_logit("abc", document)) for document in ("ax", "bca", "y")]
    assert_allclose([row["score"] for row in got["data"]], expected_scores, rtol=1e-6)
    assert got["usage"] == usage(15)


async def test_each_query_may_have_its_own_document() -> None:
    got = await answer(CROSS_ENCODER, "/score", queries=["ab", "cd"], documents=["a", "cd"], use_activation=False)
    assert [row["score"] for row in got["data"]] == [pair_logit("ab", "a"), pair_logit("cd", "cd")]


async def test_a_bi_encoder_scores_by_the_cosine_of_its_vectors() -> None:
    got = await answer(EMBEDDER, "/score", text_1="ab", text_2="xyz")
    cosine = float(unit(expected("q:ab")) @ unit(expected("p:xyz")))
    assert got["data"][0]["score"] == pytest.approx(cosine, rel=1e-6)


async def test_a_long_document_is_cut_by_default_and_never_rejected() -> None:
    model = LetterModel(CROSS_ENCODER)
    async with serving_in_memory(model) as served, served.client() as client:
        response = await client.post("/score", json={"queries": "a", "documents": "a" * 10_000})
    assert response.status_code == 200
    assert response.json()["usage"]["prompt_tokens"] == CARD.max_tokens
    (given,) = model.given
    assert isinstance(given.source, PairInput)
    assert given.source.max_tokens == MODEL_MAX


async def test_limits_and_the_instruction_reach_the_model() -> None:
    model = LetterModel(CROSS_ENCODER)
    extras = {"max_tokens_per_query": 5, "max_tokens_per_doc": 0, "instruction": "find", "truncate_prompt_tokens": 9}
    async with serving_in_memory(model) as served, served.client() as client:
        await client.post("/rerank", json={"query": "a", "documents": ["b"], **extras})
    wanted = PairInput(first="a", second="b", max_tokens=9, max_first_tokens=5, instruction="find")
    assert [given.source for given in model.given] == [wanted]


@pytest.mark.parametrize("route", RERANK_ROUTES)
async def test_rerank_sorts_documents_and_keeps_their_places(route: str) -> None:
    documents = ["y", "ax", "bca", "xa"]
    got = await answer(CROSS_ENCODER, route, query="abc", documents=documents)
    assert set(got) == {"id", "object", "created", "model", "usage", "results", "meta"}
    assert (got["id"], got["usage"]) == ("score-r", {"prompt_tokens": 20, "total_tokens": 20})
    assert [result["index"] for result in got["results"]] == [2, 1, 3, 0]
    for result in got["results"]:
        assert result["document"] == {"text": documents[result["index"]], "multi_modal": None}
        score = sigmoid(pair_logit("abc", documents[result["index"]]))
        assert result["relevance_score"] == pytest.approx(score, rel=1e-6)


async def test_rerank_keeps_the_best_and_leaves_documents_out_if_told() -> None:
    documents = ["y", {"text": "ax"}, "bca"]
    got = await answer(CROSS_ENCODER, "/rerank", query="abc", documents=documents, top_n=2, return_documents=False)
    assert [(result["index"], set(result)) for result in got["results"]] == [
        (2, {"index", "relevance_score"}),
        (1, {"index", "relevance_score"}),
    ]
    every = await answer(CROSS_ENCODER, "/rerank", query="abc", documents=documents, top_n=0)
    assert len(every["results"]) == 3


@pytest.mark.parametrize(
    ("card", "route", "name"),
    [
        (CLASSIFIER, "/v1/embeddings", "Embeddings"),
        (EMBEDDER, "/classify", "Classification"),
        (EMBEDDER, "/classify_tokens", "Token Classification"),
        *((CLASSIFIER, route, "Score") for route in SCORE_ROUTES),
        *((CLASSIFIER, route, "Rerank (Score)") for route in RERANK_ROUTES),
    ],
)
async def test_the_route_of_a_task_that_no_model_can_do_is_not_there(card: ModelCard, route: str, name: str) -> None:
    response = await ask(card, route, input="a")
    assert (response.status_code, response.json()["detail"]) == (404, "Not Found")
    has = "classify" if card is CLASSIFIER else "embed, sparse, token_embed, score"
    message = f"No served model gives {TASKS[route].gives}; served: letters ({has})"
    assert response.json()["error"] == {"message": message, "type": "NotFoundError", "param": None, "code": 404}
    assert TASKS[route].name == name


async def test_pooling_for_what_the_model_does_not_give_is_answered_400() -> None:
    error = error_of(await ask(CARD_WITH_DENSE, "/pooling", input="a", task="sparse"), 400)
    assert error["message"] == "Unsupported task: 'sparse' Supported tasks: ('embed')"


async def test_a_task_that_only_another_model_can_do_is_answered_501() -> None:
    others = replace(CLASSIFIER, name="others")
    async with serving_in_memory(LetterModel(EMBEDDER), LetterModel(others)) as served:
        async with served.client() as client:
            wrong = await client.post("/v1/embeddings", json={"input": "a", "model": "others"})
            right = await client.post("/predict", json={"inputs": "a"})
            absent = await client.post("/classify_tokens", json={"input": "a", "model": "others"})
    assert error_of(wrong, 501) == {
        "message": "The model does not support Embeddings API: `others` gives no vectors; "
        "served: letters (embed, sparse, token_embed, score), others (classify)",
        "type": "NotImplementedError",
        "param": None,
        "code": 501,
    }
    assert (right.status_code, absent.status_code) == (200, 404)


CARD_WITH_DENSE = replace(EMBEDDER, outputs=EMBEDDER.outputs[:1])

BODIES: dict[str, tuple[ModelCard, dict[str, Any]]] = {
    "/v1/embeddings": (EMBEDDER, {"input": "a"}),
    "/pooling": (EMBEDDER, {"input": "a"}),
    "/classify": (CLASSIFIER, {"input": "a"}),
    "/classify_tokens": (TAGGER, {"input": "a"}),
    **dict.fromkeys(SCORE_ROUTES, (CROSS_ENCODER, {"queries": "a", "documents": "b"})),
    **dict.fromkeys(RERANK_ROUTES, (CROSS_ENCODER, {"query": "a", "documents": ["b"]})),
    "/embeddings": (EMBEDDER, {"input": "a"}),
    "/v1/embed": (EMBEDDER, {"texts": ["a"]}),
    "/v2/embed": (EMBEDDER, {"texts": ["a"]}),
    "/embed": (EMBEDDER, {"inputs": "a"}),
    "/embed_all": (EMBEDDER, {"inputs": "a"}),
    "/embed_sparse": (EMBEDDER, {"inputs": "a"}),
    "/predict": (CLASSIFIER, {"inputs": "a"}),
    "/similarity": (EMBEDDER, {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
    "/embeddings_image": (EMBEDDER, {"input": "a", "modality": "text"}),
    "/v1/multimodalembeddings": (EMBEDDER, {"inputs": [{"content": [{"type": "text", "text": "a"}]}]}),
    "/api/embed": (EMBEDDER, {"input": "a"}),
    "/api/embeddings": (EMBEDDER, {"prompt": "a"}),
    "/vectors": (EMBEDDER, {"text": "a"}),
    "/vectors/": (EMBEDDER, {"text": "a"}),
    "/vectorize": (EMBEDDER, {"texts": ["a"]}),
    "/v1/ranking": (CROSS_ENCODER, {"query": {"text": "a"}, "passages": [{"text": "b"}]}),
    "/v1/reranking": (CROSS_ENCODER, {"query": "a", "input": ["b"]}),
}
NO_MODEL = TEI_PATHS | WEAVIATE_PATHS
"""Routes whose requests name no model."""


def message_of(response: httpx.Response, status: int) -> str:
    """Return the error message of a response in the words of its route."""
    assert response.status_code == status, response.text
    said = response.json()
    told: object = said["message"] if "message" in said else said["error"]
    return str(told["message"]) if isinstance(told, dict) else str(told)


@pytest.mark.parametrize("route", [route for route in TASKS if route not in NO_MODEL])
async def test_every_task_answers_404_for_another_model(route: str) -> None:
    card, body = BODIES[route]
    response = await ask(card, route, **body, model="other")
    assert message_of(response, 404) == "The model `other` does not exist. Served: letters"


@pytest.mark.parametrize("route", TASKS)
async def test_every_task_takes_the_served_name_or_none_and_ignores_what_it_does_not_know(route: str) -> None:
    card, body = BODIES[route]
    for name in ("letters", "", None):
        response = await ask(card, route, **body, model=name, user="u", priority=1, unknown={"x": 1})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("route", [route for route in TASKS if route not in OLLAMA_PATHS])
async def test_every_task_names_a_missing_field(route: str) -> None:
    response = await ask(BODIES[route][0], route)
    if route in TEI_PATHS:
        wanted = {"error": "inputs: this field is required", "error_type": "Validation"}
        assert (response.status_code, response.json()) == (422, wanted)
    elif route.endswith("/embed"):
        message = "Exactly one of texts, images, or inputs must be provided, and it must be non-empty"
        assert error_of(response, 400)["message"] == message
    elif route in WEAVIATE_PATHS or route == "/v1/ranking":
        assert any(field in message_of(response, 400) for field in BODIES[route][1])
    else:
        error = error_of(response, 400)
        assert error["param"] in BODIES[route][1]
        assert error["message"].startswith(error["param"])


@pytest.mark.parametrize("route", TASKS)
async def test_under_overload_every_task_is_rejected_before_its_body_is_read(route: str) -> None:
    gate = Gate()
    card = replace(BODIES[route][0], outputs=(*Output,))
    async with serving_in_memory(LetterModel(card, on_preprocess=gate), engine=EngineConfig(max_requests=1)) as served:
        front_door = served.application.front_door

        def decide(path: str) -> object:
            scope = {"type": "http", "method": "POST", "path": path, "headers": []}
            assert front_door.reject(scope) is None
            return front_door.decide(scope, b"0123456789")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(served.engine.embed, "a")
            await gate.arrived()
            assert decide(route) is None, "nobody was rejected so far"
            async with served.client() as client:
                assert (await client.post(route, json=BODIES[route][1])).status_code == 429
            problem, other = decide(route), decide("/v1/models")
            gate.open()
    assert isinstance(problem, Problem)
    assert (problem.status, other) == (429, None)


async def test_entities_are_found_with_their_places() -> None:
    got = await answer(TAGGER, "/classify_tokens", input=["abXYc", "abc"])
    assert [row["index"] for row in got["data"]] == [0, 1]
    [entity] = got["data"][0]["entities"]
    assert (entity["label"], entity["start"], entity["end"], entity["text"]) == ("CAPITAL", 2, 4, "XY")
    assert entity["score"] == pytest.approx(softmax(token_logits("X"))[0, 1], rel=1e-5)
    assert got["data"][1]["entities"] == []


async def test_pooling_gives_the_scores_of_each_token() -> None:
    got = await answer(TAGGER, "/pooling", input="aB", task="token_classify")
    assert_allclose(got["data"][0]["data"], softmax(token_logits("aB")), rtol=1e-5)


async def test_tokens_become_a_text_again() -> None:
    async with serving_in_memory() as served, served.client() as client:
        tokens = (await client.post("/tokenize", json={"prompt": "añ"})).json()["tokens"]
        back = await client.post("/detokenize", json={"tokens": tokens})
        nothing = await client.post("/detokenize", json={"tokens": []})
        unknown = await client.post("/detokenize", json={"tokens": [97, 0x110000]})
        other = await client.post("/detokenize", json={"tokens": [1], "model": "other"})
    assert back.json() == {"prompt": "añ"}
    assert nothing.json() == {"prompt": ""}
    assert error_of(unknown, 400)["message"] == "Token id 1114112 is out of vocabulary"
    assert error_of(other, 404)["param"] == "model"


async def test_large_bodies_of_tokens_are_read_off_the_event_loop() -> None:
    text = "ab" * 20_000
    async with serving_in_memory() as served, served.client() as client:
        tokens = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
        back = await client.post("/detokenize", json={"tokens": tokens})
        wrong = await client.post("/detokenize", json={"tokens": [*tokens, -1]})
    assert back.json() == {"prompt": text}
    assert error_of(wrong, 400)["message"] == "tokens[40000]: Expected `int` >= 0"


async def test_of_the_name_of_an_unknown_model_little_is_repeated_and_in_one_line() -> None:
    error = error_of(await ask(EMBEDDER, "/v1/embeddings", input="a", model="a\n" + "b" * 500), 404)
    assert error["message"] == f"The model `a {'b' * 37}…` does not exist. Served: letters"


async def test_a_conversation_is_tokenized_with_the_beginning_of_the_answer() -> None:
    async with serving_in_memory() as served, served.client() as client:
        usual = await client.post("/tokenize", json={"messages": CHAT, "return_token_strs": True})
        without = await client.post("/tokenize", json={"messages": CHAT, "add_generation_prompt": False})
    assert "".join(usual.json()["token_strs"]) == "<user>hi<assistant>"
    assert without.json()["tokens"] == [ord(letter) for letter in "<user>hi"]


async def test_requests_in_the_format_of_text_embeddings_inference_get_no_lines() -> None:
    wants_lines = {"accept": "application/x-ndjson"}
    async with serving_in_memory(LetterModel(CROSS_ENCODER)) as served, served.client() as client:
        theirs = await client.post("/rerank", json={"query": "a", "texts": ["ax", "b"]}, headers=wants_lines)
        wrong = await client.post("/rerank", json={"query": "a", "texts": []}, headers=wants_lines)
    assert (theirs.status_code, theirs.headers["content-type"]) == (200, "application/json")
    assert sorted(row["index"] for row in theirs.json()) == [0, 1]
    assert (wrong.status_code, wrong.json()["error_type"]) == (400, "Empty")


async def test_the_list_of_models_says_what_the_model_gives() -> None:
    async with serving_in_memory(LetterModel(CLASSIFIER)) as served, served.client() as client:
        [model] = (await client.get("/v1/models")).json()["data"]
    assert model["permission"] == []  # of vLLM's list; here a key opens everything or nothing
    facts = model["staged_pool"]
    assert (facts["outputs"], facts["labels"], facts["scoring"]) == (["labels"], ["a", "b", "c"], None)


async def test_the_version_is_that_of_the_package() -> None:
    async with serving_in_memory() as served, served.client() as client:
        assert (await client.get("/version")).json() == {"version": staged_pool.__version__}


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_is_health(method: str) -> None:
    async with serving_in_memory() as served, served.client() as client:
        response = await client.request(method, "/ping")
    assert (response.status_code, [*response.json()]) == (200, ["unix"])


async def test_more_ids_than_preprocess_holds_become_no_text() -> None:
    async with serving_in_memory(engine=EngineConfig(waiting_tokens=100)) as served, served.client() as client:
        most = LetterModel().card.max_tokens
        enough = await client.post("/detokenize", json={"tokens": [97] * max(100, most)})
        more = await client.post("/detokenize", json={"tokens": [97] * (max(100, most) + 1)})
        one_of_several = await client.post("/decode", json={"ids": [[97], [97] * (max(100, most) + 1)]})
    assert enough.status_code == 200
    assert "at most" in error_of(more, 413)["message"]
    assert one_of_several.status_code == 413


DENSE = b'{"%s":[' + b",".join([b"[]"] * 200_000) + b"]}"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/embeddings", b"input"), ("/pooling", b"messages"), ("/tokenize", b"messages"), ("/detokenize", b"tokens"),
        ("/decode", b"ids"), ("/invocations", b"input"), ("/", b"inputs"), ("/api/show", b"model"),
    ],
)  # fmt: skip
async def test_a_body_of_more_values_than_a_request_has_is_not_decoded(path: str, field: bytes) -> None:
    async with serving_in_memory(engine=EngineConfig(max_request_items=1)) as served, served.client() as client:
        answered = await client.post(path, content=DENSE % field, headers={"content-type": "application/json"})
    assert answered.status_code == 413
    assert ("lists, objects, fields and texts" in answered.text) is (path != "/api/show")


async def test_inputs_are_counted_before_anything_is_made_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr("staged_pool.api.wire.inputs.TextInput", lambda *args, **fields: made.append(args))
    async with serving_in_memory(engine=EngineConfig(max_request_items=2)) as served, served.client() as client:
        error = error_of(await client.post("/v1/embeddings", json={"input": ["a", "b", "c"]}), 413)
    assert error["message"] == "The request has 3 inputs; at most 2 are accepted."
    assert error["param"] == "input"
    assert made == []
