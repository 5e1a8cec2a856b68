"""The programs of frameworks that are installed here too: they answer in the shape that is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer
from starlette.testclient import TestClient

from perf.peers.dialects import OPENAI, least_cosine
from perf.peers.services.serve_naive import create_app
from tests.api.conftest import tiny_folder  # noqa: F401  # a fixture

TEXTS = ["one", "a longer text of several words", "two"]


@pytest.fixture
def nothing_blocks_the_event_loop() -> None:
    """Allow blocking: these measurements do."""


@pytest.mark.parametrize("threadpool", [False, True], ids=["inline", "threadpool"])
def test_the_naive_server_gives_the_vectors_of_sentence_transformers(
    tiny_folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    *,
    threadpool: bool,
) -> None:
    for name, value in {"MODEL": str(tiny_folder), "DTYPE": "float32", "THREADS": "1"}.items():
        monkeypatch.setenv(f"PEER_{name}", value)
    client = TestClient(create_app(threadpool=threadpool))
    assert client.get("/health").status_code == 200
    body = json.loads(OPENAI.embed(TEXTS).partition(b"\r\n\r\n")[2])
    answer = client.post("/v1/embeddings", json=body)
    expected = SentenceTransformer(str(tiny_folder), device="cpu").encode(TEXTS)
    assert least_cosine(expected, OPENAI.vectors(answer.content)) > 0.9999
