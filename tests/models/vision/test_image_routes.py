"""Models of images beside one of texts in one server: what each route makes of each of them."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import BACKENDS
from tests.models.conftest import TinyFolder
from tests.models.images.drawing import image
from tests.servers.in_memory import serving_in_memory
from tests.servers.tiny_models import tiny

KINDS = ("bert-mean", "ce-xlmr-reranker", "clip", "dinov2-labels", "colpali", "qwen2-vl", "jina-m0")

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning"),  # the client's own, on trio
]


def url(width: int, height: int) -> str:
    source = image(width, height, 1).source
    assert isinstance(source, bytes)
    return "data:image/png;base64," + base64.b64encode(source).decode()


CAT, DOG = url(90, 120), url(300, 200)
DAMAGED = CAT[: len("data:image/png;base64,") + 100]
ELSEWHERE = "http://example.com/cat.png"


def part(source: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": source}}


@pytest.fixture(scope="module", params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    """A loop for all tests of the module, which share its servers."""
    return request.param


@pytest.fixture(scope="module")
def folders(tiny_folder: TinyFolder) -> dict[str, Path]:
    """Built before the event loop runs, which must not be blocked."""
    return {kind: tiny_folder(kind) for kind in KINDS}


@asynccontextmanager
async def client_of(folders: dict[str, Path]) -> AsyncIterator[httpx.AsyncClient]:
    models = [tiny(folder, served_name=kind) for kind, folder in folders.items()]
    async with serving_in_memory(*models) as served, served.client() as client:
        yield client


@pytest.fixture(scope="module")
async def client(anyio_backend: object, folders: dict[str, Path]) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(folders) as client:
        yield client


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tiny_folder: TinyFolder) -> dict[str, Path]:
    """That of one kind."""
    return {request.param: tiny_folder(request.param)}


@pytest.fixture(scope="module")
async def alone(anyio_backend: object, folder: dict[str, Path]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of that model alone."""
    async with client_of(folder) as client:
        yield client


async def test_each_model_does_what_it_can_with_images_and_says_what_it_cannot(client: httpx.AsyncClient) -> None:
    async def ask(path: str, model: str, **fields: Any) -> dict[str, Any]:
        response = await client.post(path, json={"model": model, **fields})
        found: dict[str, Any] = response.json()
        return found

    images, talk = [{"image": CAT}, {"image": DOG}], [{"role": "user", "content": [part(CAT)]}]
    for model, lengths in (("clip", [24, 24]), ("qwen2-vl", [32, 32])):
        found = await ask("/v1/embeddings", model, input=images)
        assert [len(row["embedding"]) for row in found["data"]] == lengths
        alone = await ask("/v1/embeddings", model, messages=talk)
        assert alone["usage"]["prompt_tokens"] < found["usage"]["prompt_tokens"]
    labels = await ask("/classify", "dinov2-labels", input=images)
    assert [len(row["probs"]) for row in labels["data"]] == [3, 3]
    pooled = await ask("/pooling", "dinov2-labels", task="classify", input=images)
    for row, wanted in zip(pooled["data"], labels["data"], strict=True):
        assert row["data"] == pytest.approx(wanted["probs"], abs=1e-5)
    for model in ("colpali", "qwen2-vl"):
        found = await ask("/pooling", model, task="token_embed", input=images)
        assert all(len(row["data"]) > 1 for row in found["data"])
    for model in ("clip", "colpali", "qwen2-vl", "jina-m0"):
        documents = [{"content": [part(CAT)]}, {"content": [part(DOG)]}]
        scores = await ask("/score", model, queries="a cat", documents=documents)
        ranked = await ask("/rerank", model, query="a cat", documents=documents)
        assert {row["index"]: row["relevance_score"] for row in ranked["results"]} == {
            row["index"]: pytest.approx(row["score"], abs=1e-5) for row in scores["data"]
        }
        wrong = await ask("/score", model, queries="a cat", documents=[documents[0], {"content": [part(DAMAGED)]}])
        assert (wrong["error"]["code"], wrong["error"]["param"], wrong["error"]["index"]) == (422, "documents", 1)

    damaged = {"content": [part(DAMAGED)]}
    mistakes: tuple[tuple[str, dict[str, Any], str, int], ...] = (
        ("/score", {"text_1": "a cat", "text_2": [documents[0], damaged]}, "text_2", 1),
        ("/rerank", {"query": damaged, "documents": documents}, "query", 0),
        ("/rerank", {"query": "a cat", "documents": [*documents, damaged]}, "documents", 2),
        ("/v2/embed", {"images": [CAT, DAMAGED]}, "images", 1),
        ("/v2/embed", {"inputs": [documents[0], damaged]}, "inputs", 1),
    )
    for path, fields, name, index in mistakes:
        error = (await ask(path, "clip", **fields))["error"]
        assert (error["param"], error["index"]) == (name, index), (path, error)

    for path, model, fields, status in (
        ("/v1/embeddings", "bert-mean", {"input": ["a", {"image": ELSEWHERE}]}, 501),  # whatever the URL
        ("/score", "bert-mean", {"queries": "a", "documents": [{"content": [part(ELSEWHERE)]}]}, 501),
        ("/rerank", "ce-xlmr-reranker", {"query": "a", "documents": ["b", {"content": [part(CAT)]}]}, 501),
        ("/rerank", "ce-xlmr-reranker", {"query": {"content": [part(CAT)]}, "documents": ["a", "b"]}, 501),
        ("/score", "ce-xlmr-reranker", {"queries": "a", "documents": [{"content": [part(CAT)]}]}, 501),
        ("/v1/embeddings", "dinov2-labels", {"input": images}, 501),
        ("/classify", "dinov2-labels", {"input": ["a text"]}, 501),
        ("/classify", "clip", {"input": images}, 501),
        ("/v1/embeddings", "colpali", {"input": images}, 501),
        ("/v1/embeddings", "clip", {"input": [{"image": ELSEWHERE}]}, 400),
    ):
        error = (await ask(path, model, **fields))["error"]
        assert error["code"] == status, (path, model, error)


WORDS = "Describe the image."
"""Text that vLLM's examples send beside a page. These models are shown it around each page."""


@pytest.mark.parametrize("folder", ["colpali", "colqwen2"], indirect=True)
async def test_a_page_may_come_with_the_words_that_go_around_it(alone: httpx.AsyncClient) -> None:
    async def ask(path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        response = await alone.post(path, json=fields)
        return response.status_code, response.json()

    def text(said: str) -> dict[str, Any]:
        return {"type": "text", "text": said}

    pages = [{"content": [part(CAT)]}, {"content": [part(DOG)]}]
    wanted = [row["score"] for row in (await ask("/score", queries="a cat", documents=pages))[1]["data"]]
    for content in (
        [part(CAT), text(WORDS)],
        [text(WORDS), part(CAT)],
        [part(CAT), text("")],
        [text(" "), part(CAT), text(f"\n{WORDS} ")],
        [part(CAT), text("Describe"), text("the image.")],
    ):
        documents = {"content": content}
        _, scores = await ask("/score", queries="a cat", documents=documents)
        assert [row["score"] for row in scores["data"]] == pytest.approx(wanted[:1], abs=1e-5), content
        _, ranking = await ask("/rerank", query="a cat", documents=[documents, pages[1]])
        assert {row["index"]: row["relevance_score"] for row in ranking["results"]} == pytest.approx(
            dict(enumerate(wanted)), abs=1e-5
        )
        _, asked = await ask("/score", queries=documents, documents=["a cat", "a dog"])
        assert len(asked["data"]) == 2
        _, page = await ask("/pooling", task="token_embed", input=[{"image": CAT}])
        for messages in (
            [{"role": "user", "content": content}],
            [{"role": "system", "content": ""}, {"role": "user", "content": content}],
        ):
            _, pooled = await ask("/pooling", messages=messages)
            assert len(pooled["data"][0]["data"]) == len(page["data"][0]["data"])
            assert pooled["data"][0]["data"][0] == pytest.approx(page["data"][0]["data"][0], abs=1e-5)
    for said in ("red colour", f"{WORDS} Briefly.", "Describe"):
        status, rejected = await ask("/score", queries="a", documents=[pages[0], {"content": [part(CAT), text(said)]}])
        assert status == 400
        assert (rejected["error"]["param"], rejected["error"]["index"]) == ("documents", 1)
        assert f"'{WORDS}'" in rejected["error"]["message"]
        assert said not in rejected["error"]["message"].replace(WORDS, "")
    status, rejected = await ask("/score", queries="a", documents=[{"content": [part(CAT), part(DOG)]}])
    assert status == 400, rejected


@pytest.mark.parametrize("folder", ["clip", "siglip", "colpali"], indirect=True)
async def test_models_of_one_text_or_one_image_take_either_as_messages(
    alone: httpx.AsyncClient, folder: dict[str, Path]
) -> None:
    [model] = folder
    task = "token_embed" if model == "colpali" else "embed"

    async def vector(**fields: Any) -> list[float]:
        response = await alone.post("/pooling", json={"task": task, **fields})
        assert response.status_code == 200, response.text
        [row] = response.json()["data"]
        vector: list[float] = row["data"][-1] if task == "token_embed" else row["data"]
        return vector

    said, shown = await vector(input="a photo of a cat"), await vector(input=[{"image": CAT}])
    texts: list[Any] = [
        [{"role": "user", "content": "a photo of a cat"}],
        [{"role": "user", "content": [{"type": "text", "text": "a photo of a cat"}]}],
        [{"role": "system", "content": ""}, {"role": "user", "content": "a photo of a cat"}],
        [{"role": "system", "content": "a photo "}, {"role": "user", "content": "of a cat"}],
    ]
    for messages in texts:
        assert await vector(messages=messages) == pytest.approx(said, abs=1e-5)
        assert await vector(input=messages) == pytest.approx(said, abs=1e-5)
    images: list[Any] = [
        [{"role": "user", "content": [part(CAT)]}],
        [{"role": "user", "content": [part(CAT), {"type": "text", "text": ""}]}],
        [{"role": "system", "content": ""}, {"role": "user", "content": [{"type": "text", "text": " "}, part(CAT)]}],
        [{"role": "system", "content": [{"type": "text", "text": ""}]}, {"role": "user", "content": [part(CAT)]}],
    ]
    for messages in images:
        assert await vector(messages=messages) == pytest.approx(shown, abs=1e-5)
    both = [{"role": "user", "content": [part(CAT), {"type": "text", "text": "a photo of a cat"}]}]
    for path in ("/pooling", "/v1/embeddings") if model != "colpali" else ("/pooling",):
        for messages in (both, [{"role": "user", "content": [part(CAT), part(DOG)]}]):
            response = await alone.post(path, json={"messages": messages})
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert "one image or one text at a time, and no conversations of both" in error["message"]
            assert error["param"] == "messages"
    counted = await alone.post("/tokenize", json={"messages": [{"role": "user", "content": "a cat"}]})
    assert counted.status_code == 200, counted.text


async def test_what_is_wrong_with_the_options_of_images_is_said_of_their_field(client: httpx.AsyncClient) -> None:
    images, talk = [{"image": CAT}, {"image": DOG}], [{"role": "user", "content": [part(CAT), part(DOG)]}]
    for path, fields in (
        ("/v1/embeddings", {"model": "clip", "input": images}),
        ("/v1/embeddings", {"model": "qwen2-vl", "input": images}),
        ("/v1/embeddings", {"model": "qwen2-vl", "messages": talk}),
        ("/v2/embed", {"model": "clip", "images": [CAT]}),
        ("/score", {"model": "clip", "queries": "a", "documents": [{"content": [part(CAT)]}]}),
        ("/rerank", {"model": "colpali", "query": "a", "documents": [{"content": [part(CAT)]}]}),
        ("/classify", {"model": "dinov2-labels", "input": images}),
    ):
        response = await client.post(path, json=fields | {"mm_processor_kwargs": {"do_rescale": False}})
        assert response.status_code == 400, (path, response.text)
        error = response.json()["error"]
        assert "do_rescale" in error["message"], error
        assert error["param"] == "mm_processor_kwargs", error


async def test_a_text_and_an_image_of_one_object_are_read_together(client: httpx.AsyncClient) -> None:
    async def ask(model: str, path: str = "/v1/embeddings", **fields: Any) -> tuple[int, dict[str, Any]]:
        response = await client.post(path, json={"model": model, **fields})
        return response.status_code, response.json()

    together, parts = {"text": "a cat", "image": CAT}, [part(CAT), {"type": "text", "text": "a cat"}]
    _, wanted = await ask("qwen2-vl", messages=[{"role": "user", "content": parts}])
    _, found = await ask("qwen2-vl", input=[together, {"text": "a cat"}, {"image": CAT}, {"content": parts}])
    rows = [row["embedding"] for row in found["data"]]
    assert rows[0] == pytest.approx(wanted["data"][0]["embedding"], abs=1e-5)
    assert rows[3] == pytest.approx(rows[0], abs=1e-5)
    for alone in rows[1:3]:
        assert rows[0] != pytest.approx(alone, abs=1e-3)
    for model, shown, status, index, what in (
        ("clip", CAT, 400, 1, "no conversations of both"),
        ("bert-mean", CAT, 501, None, "reads no images"),
        ("qwen2-vl", DAMAGED, 422, 1, "image"),
    ):
        code, answer = await ask(model, input=["a", {"text": "a cat", "image": shown}])
        error = answer["error"]
        assert (code, error.get("index")) == (status, index), error
        assert what in error["message"], error
    _, ranking = await ask("qwen2-vl", "/rerank", query="a dog", documents=[together, {"content": parts}])
    one, two = (row["relevance_score"] for row in ranking["results"])
    assert one == pytest.approx(two, abs=1e-5)


async def test_a_call_may_hold_conversations_of_several_images(client: httpx.AsyncClient) -> None:
    async def ask(*conversations: list[dict[str, Any]]) -> dict[str, Any]:
        response = await client.post("/v1/embeddings", json={"model": "qwen2-vl", "messages": conversations})
        found: dict[str, Any] = response.json()
        return found

    def said(*content: dict[str, Any]) -> dict[str, Any]:
        return {"role": "user", "content": [*content, {"type": "text", "text": "and so on"}]}

    conversations = [[said(part(CAT), part(DOG))], [said(part(DOG), part(CAT))], [said(part(CAT)), said(part(DOG))]]
    together = await ask(*conversations)
    alone = [(await ask(one))["data"][0]["embedding"] for one in conversations]
    for row, wanted in zip(together["data"], alone, strict=True):
        assert row["embedding"] == pytest.approx(wanted, abs=1e-4)
    assert alone[0] != pytest.approx(alone[1], abs=1e-2)
    assert alone[0] != pytest.approx(alone[2], abs=1e-2)
    for wrong, code, what in (
        ([said(part(CAT), part(DAMAGED))], 422, "Image 2 of 2: "),
        ([said(*[part(CAT)] * 50)], 400, "maximum context length is 320 tokens"),
    ):
        error = (await ask(conversations[0], wrong))["error"]
        assert (error["code"], error["param"], error["index"]) == (code, "messages", 1), error
        assert what in error["message"]


async def test_tokens_of_conversations_with_images_are_those_that_the_device_reads(client: httpx.AsyncClient) -> None:
    async def ask(path: str, model: str, *content: object, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": [{"type": "text", "text": "it is"}, *content]}]
        response = await client.post(path, json={"model": model, "messages": messages, **fields})
        found: dict[str, Any] = response.json()
        return found

    for options in ({}, {"mm_processor_kwargs": {"max_pixels": 8 * 784}}):
        embedded = await ask("/v1/embeddings", "qwen2-vl", part(CAT), part(DOG), **options)
        wanted = embedded["usage"]["prompt_tokens"]
        found = await ask("/tokenize", "qwen2-vl", part(CAT), part(DOG), add_generation_prompt=False, **options)
        assert (found["count"], len(found["tokens"]), found["token_strs"]) == (wanted, wanted, None)
    named = await ask("/tokenize", "qwen2-vl", part(CAT), return_token_strs=True)
    assert len(named["token_strs"]) == len(named["tokens"])
    assert named["token_strs"].count("<|image_pad|>") > 4
    for model, given, code, what in (
        ("qwen2-vl", ELSEWHERE, 400, "Send the file itself"),
        ("qwen2-vl", "data:image/png;base64,AAAA", 415, ""),
        ("colpali", CAT, 400, "one image or one text at a time"),
        ("clip", CAT, 501, "does not read images as tokens"),
        ("dinov2-labels", CAT, 501, "does not read images as tokens"),
        ("bert-mean", CAT, 501, "does not read images as tokens"),
    ):
        error = (await ask("/tokenize", model, part(given)))["error"]
        assert error["code"] == code, error
        assert what in error["message"], error
        assert error["param"] == ("messages" if code < 500 else None)


async def test_what_a_model_reads_is_shown(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()["data"]
    assert {row["id"]: row["staged_pool"]["lanes"] for row in listed} == {
        "bert-mean": ["text"],
        "ce-xlmr-reranker": ["text"],
        "clip": ["text", "image"],
        "dinov2-labels": ["image"],
        "colpali": ["text", "image"],
        "qwen2-vl": ["text", "image"],
        "jina-m0": ["text", "image"],
    }
