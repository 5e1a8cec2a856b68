"""Images from the request to the answer: sent, uploaded and fetched, on a real engine and from real hosts.

Where URLs may lead, and what hosts may do, is in `tests/chaos/test_image_hosts.py`.
"""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from blockbuster import BlockBuster

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.media.dns import Resolve
from staged_pool.runtime.media.fetcher import MediaFetcher
from staged_pool.runtime.media.files import read_file
from tests.runtime.images import completer
from tests.runtime.media.origin import LOCAL, Names, answer, origin
from tests.servers.in_memory import serving_in_memory
from tests.servers.on_socket import serving
from tests.support.cards import BOTH_LANES
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.waiting import until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning"),  # the client's own, on trio
]

mimetypes.init()  # the client's table of types, from files

CAT, DOG = expected("cat").tolist(), expected("dog").tolist()
SENT = base64.b64encode(b"cat").decode()


@asynccontextmanager
async def image_client(
    model: LetterModel | None = None,
    find: Resolve | None = None,
    read: Callable[[Path, str, int], bytes] = read_file,
    **settings: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    defaults: dict[str, Any] = {"allow_media_domains": ("*", LOCAL), "media_timeout_s": 10.0}
    config = EngineConfig(**defaults | settings)
    fetcher = MediaFetcher(config, find=find or Names(), read=read)
    async with serving_in_memory(model or LetterModel(BOTH_LANES), fetch=fetcher.fetch) as served:
        async with served.client() as client:
            yield client
        admission = served.engine.statistics().admission
        assert (admission.requests, admission.items, admission.tokens) == (0, 0, 0)
        await until(lambda: completer(served.engine).fetching == 0)


def vectors(response: httpx.Response) -> list[list[float]]:
    assert response.status_code == 200, response.text
    return [row.get("embedding") or row["data"] for row in response.json()["data"]]


@pytest.mark.parametrize("route", ["/v1/embeddings", "/pooling"])
async def test_images_and_texts_may_come_together_in_json_and_in_forms(route: str) -> None:
    async with origin() as host, image_client() as client:
        host.pages["/"] = answer(b"dog")
        inputs = [{"image": SENT}, {"text": "a"}, {"image": host.url()}, {"image": f"data:image/png;base64,{SENT}"}]
        objects = await client.post(route, json={"input": inputs})
        files = [("image", ("a.png", b"cat", "image/png")), ("image", ("b.png", b"dog", "image/png"))]
        request = client.build_request("POST", route, data={"input": "a", "use_activation": "false"}, files=files)
        form = await client.post(route, content=await request.aread(), headers=request.headers)
    assert vectors(objects) == [CAT, expected("a").tolist(), DOG, CAT]
    assert vectors(form) == [expected("a").tolist(), CAT, DOG]


async def test_documents_may_be_images_that_are_fetched() -> None:
    async with origin() as host, image_client() as client:
        host.pages["/"] = answer(b"dog")
        documents = [{"image": host.url()}, "cat", {"content": [{"type": "image_url", "image_url": SENT_URL}]}]
        response = await client.post("/rerank", json={"query": "cat", "documents": documents})
    assert response.status_code == 200, response.text
    assert {result["index"] for result in response.json()["results"]} == {0, 1, 2}


SENT_URL = f"data:image/png;base64,{SENT}"


async def test_a_large_image_reaches_the_model_as_it_was_sent() -> None:
    letters = "ab" * 40_000
    model = LetterModel(BOTH_LANES)
    async with image_client(model) as client:
        sent = base64.b64encode(letters.encode()).decode()
        response = await client.post("/v1/embeddings", json={"input": [{"image": sent}, {"text": "a"}]})
    assert vectors(response) == [expected(letters).tolist(), expected("a").tolist()]


async def test_a_file_is_read_from_the_folder_that_is_open_and_from_nowhere_else(tmp_path: Path) -> None:
    async with image_client(allow_media_path=str(Path(__file__).parent)) as client:
        inside = await client.post("/v1/embeddings", json={"input": {"image": Path(__file__).as_uri()}})
        outside = await client.post("/v1/embeddings", json={"input": {"image": (tmp_path / "a").as_uri()}})
    assert inside.status_code == 200, inside.text
    assert outside.status_code == 400
    assert str(tmp_path) not in outside.text


async def test_a_disk_that_does_not_answer_fails_the_request_that_names_it_and_no_other() -> None:
    gate = Gate()

    def read(folder: Path, path: str, max_bytes: int) -> bytes:
        if path == "/hung.png":
            gate()
        return b"cat"

    try:
        async with image_client(read=read, allow_media_path="/", media_limit=2, media_timeout_s=0.5) as client:
            inputs = [{"image": "file:///a.png"}, {"image": "file:///hung.png"}]
            hung = await client.post("/v1/embeddings", json={"input": inputs})
            error = hung.json()["error"]
            assert (hung.status_code, error["type"], error["index"]) == (504, "TimeoutError", 1), error
            assert "hung" not in error["message"]
            assert vectors(await client.post("/v1/embeddings", json={"input": inputs[:1]})) == [CAT]
    finally:  # the engine has drained without it
        gate.open()


@pytest.mark.parametrize(("given", "images"), [("a text", 0), ([{"image": "aGVsbG8="}] * 3, 3)])
@pytest.mark.parametrize("headers", [{}, {"origin": "https://page.example"}])
async def test_the_engine_is_told_how_many_images_the_bytes_of_a_request_show(
    given: object,
    images: int,
    headers: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    nothing_blocks_the_event_loop: BlockBuster,
) -> None:
    nothing_blocks_the_event_loop.deactivate()  # Hypercorn's half is imported
    told: list[tuple[str, int | None]] = []
    overload, submit = Engine.overload, Engine.submit

    def watched_overload(self: Engine, *args: Any, **settings: Any) -> Any:
        told.append(("overload", settings["images"]))
        return overload(self, *args, **settings)

    async def watched_submit(self: Engine, *args: Any, **settings: Any) -> Any:
        told.append(("submit", settings["images"]))
        return await submit(self, *args, **settings)

    monkeypatch.setattr(Engine, "overload", watched_overload)
    monkeypatch.setattr(Engine, "submit", watched_submit)
    monkeypatch.setattr(Engine, "expects_rejections", True)
    async with serving(LetterModel(BOTH_LANES)) as served, served.client() as client:
        await client.post("/v1/embeddings", json={"input": given}, headers=headers)
    assert told == [("overload", images), ("submit", images)]
