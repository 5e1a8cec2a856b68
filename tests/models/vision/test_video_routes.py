"""Videos through a whole server: one that hangs or lies costs its own request alone."""

from __future__ import annotations

import base64
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest

from staged_pool.runtime.models.videos.decode import Clip
from tests.conftest import BACKENDS
from tests.models.conftest import TinyFolder
from tests.models.encoded_images import encode as encode_image
from tests.models.videos import conversation_oracle as oracle
from tests.models.videos import files, steps_oracle
from tests.models.videos.conversation_oracle import Moving
from tests.models.vision import test_qwen3_vl_reranker as rerankers
from tests.models.vision import test_qwen3_vl_videos as videos
from tests.servers.in_memory import serving_in_memory
from tests.servers.tiny_models import tiny

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning"),  # the client's own, on trio
]

SLOW = files.encode(files.shots(6, 90, 120), rate=1)
HANGING = files.encode(files.shots(5, 90, 120), rate=1)


def url(data: bytes) -> str:
    return "data:video/mp4;base64," + base64.b64encode(data).decode()


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


def video(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url(data)}}


@pytest.fixture(scope="module", params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    """A loop for all tests of the module, which share its server."""
    return request.param


@pytest.fixture(scope="module")
def folder(tiny_folder: TinyFolder) -> Path:
    """Built before the event loop runs, which must not be blocked."""
    return tiny_folder("qwen2-vl")


@pytest.fixture(scope="module")
def wanted(folder: Path) -> Any:
    frames = oracle.decode(SLOW)
    return oracle.conversation(folder, [Moving(frames, 1.0), "What is this?"])


@pytest.fixture(scope="module")
def scored(tiny_folder: TinyFolder) -> float:
    """The right score of a query and a document of a video and a text."""
    document = steps_oracle.written([steps_oracle.Moving(SLOW, 1.0), "words"])
    written = rerankers.prompt(["a query"], [document])
    return videos.wanted_score(
        tiny_folder("qwen3-vl-reranker"), written, [steps_oracle.Moving(SLOW, 1.0)], rerankers.PIXELS
    )


@pytest.fixture(scope="module")
async def client(anyio_backend: object, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    model = tiny(folder, served_name="vl", dtype="float32", image_path="exact", image_preprocess_limit=2)
    async with serving_in_memory(model) as served, served.client() as client:
        yield client


async def embedding(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post("/v1/embeddings", json={"model": "vl", **fields})
    assert response.status_code == 200, response.text
    return np.array(response.json()["data"][0]["embedding"], np.float32)


async def test_every_way_to_send_a_video_gives_its_vector(client: httpx.AsyncClient, wanted: Any) -> None:
    found = await embedding(client, **said(video(SLOW), {"type": "text", "text": "What is this?"}))
    assert np.abs(found - wanted).max() < 1e-4
    alone = await embedding(client, **said(video(SLOW)))
    one = await embedding(client, input=[{"video": url(SLOW)}])
    sent = httpx.Request("POST", "http://test", files={"video": ("a.mp4", SLOW, "video/mp4")}, data={"model": "vl"})
    kind = {"content-type": sent.headers["content-type"]}
    form = await client.post("/v1/embeddings", content=sent.read(), headers=kind)  # in one piece
    assert form.status_code == 200, form.text
    two = np.array(form.json()["data"][0]["embedding"], np.float32)
    for other in (one, two):
        assert np.abs(alone - other).max() < 1e-5
    fewer = await embedding(client, **said(video(SLOW)), media_io_kwargs={"video": {"num_frames": 2}})
    assert np.abs(alone - fewer).max() > 1e-3
    frame = base64.b64encode(encode_image(120, 90, "PNG", 1)).decode()
    ready = f"data:video/jpeg;base64,{frame},{frame}"
    assert (await embedding(client, **said({"type": "video_url", "video_url": {"url": ready}}))).shape == wanted.shape


@pytest.fixture(scope="module")
def reranker(tiny_folder: TinyFolder) -> Path:
    return tiny_folder("qwen3-vl-reranker")


async def test_videos_are_scored_and_ranked(reranker: Path, scored: float) -> None:
    model = tiny(reranker, served_name="vl", dtype="float32", image_path="exact")
    document = {"content": [video(SLOW), {"type": "text", "text": "words"}]}
    async with serving_in_memory(model) as served, served.client() as client:
        one = await client.post("/score", json={"queries": "a query", "documents": [document]})
        assert one.status_code == 200, one.text
        assert abs(one.json()["data"][0]["score"] - scored) < 1e-4
        ranked = await client.post("/rerank", json={"query": "a query", "documents": [document, "a text"]})
        assert ranked.status_code == 200, ranked.text
        scores = {each["index"]: each["relevance_score"] for each in ranked.json()["results"]}
        assert abs(scores[0] - scored) < 1e-4
        asked = {"queries": {"content": [video(SLOW)]}, "documents": ["a text"]}
        few = {"media_io_kwargs": {"video": {"num_frames": 2}}}
        whole, fewer = [await client.post("/score", json=asked | more) for more in ({}, few)]
        assert whole.status_code == fewer.status_code == 200, fewer.text
        assert abs(whole.json()["data"][0]["score"] - fewer.json()["data"][0]["score"]) > 1e-3


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        (said(video(b"#EXTM3U\nfile:///etc/passwd")), 415, "an HLS playlist: it must be MP4, MOV, WebM or GIF"),
        (said(video(SLOW[:1000])), 422, "The video is damaged"),
        (
            said({"type": "video_url", "video_url": {"url": "https://a.example/b.mp4"}}),
            400,
            "this server fetches nothing; send the video itself",
        ),
        (
            {**said(video(SLOW)), "media_io_kwargs": {"video": {"speed": 2}}},
            400,
            "option 'speed' is not known",
        ),
        ({**said(video(SLOW)), "media_io_kwargs": {"video": {"fps": 0}}}, 400, "fps must be a number above 0"),
        (said({"type": "audio_url", "audio_url": "x"}), 400, "`video_url` and `video` are"),
    ],
)
async def test_a_wrong_video_is_answered_with_what_is_wrong(
    fields: dict[str, Any], status: int, words: str, client: httpx.AsyncClient
) -> None:
    response = await client.post("/v1/embeddings", json={"model": "vl", **fields})
    assert (response.status_code, words in response.text) == (status, True), response.text


async def test_a_video_that_hangs_holds_up_no_other_input(
    client: httpx.AsyncClient, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, released = threading.Event(), threading.Event()
    kept = Clip.__init__

    def init(self: Clip, data: bytes, limits: Any) -> None:
        if data == HANGING:
            entered.set()
            assert released.wait(60)
        kept(self, data, limits)

    monkeypatch.setattr(Clip, "__init__", init)
    statuses: list[int] = []

    async def hang() -> None:
        response = await client.post("/v1/embeddings", json={"model": "vl", **said(video(HANGING))})
        statuses.append(response.status_code)

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hang)
            await anyio.to_thread.run_sync(entered.wait, 60)
            for _ in range(3):
                found = await embedding(client, **said(video(SLOW), {"type": "text", "text": "What is this?"}))
                assert np.abs(found - wanted).max() < 1e-4
            assert (await embedding(client, input="a text")).shape == wanted.shape
            assert statuses == []
            released.set()
    finally:
        released.set()
    assert statuses == [200]
