from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest
from numpy.testing import assert_allclose

from tests.clients.conftest import KEY, QUERY, TEXTS, WITHIN, Oracle

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def curl(url: str, *arguments: str) -> Any:
    command = ["curl", "--silent", "--show-error", "--fail-with-body", "--max-time", "30", *arguments, url]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def post(server: Oracle, path: str, body: object, *arguments: str) -> Any:
    headers = ["-H", "content-type: application/json", "-H", f"authorization: Bearer {KEY}"]
    return curl(server.url + path, *headers, *arguments, "-d", json.dumps(body))


@pytest.mark.parametrize("protocol", ["--http1.0", "--http1.1", "--http2-prior-knowledge"])
def test_vectors(server: Oracle, protocol: str) -> None:
    found = post(server, "/v1/embeddings", {"input": TEXTS, "model": "embedder"}, protocol)
    wanted = server("embedder", "embed", TEXTS).embeddings
    assert_allclose([one["embedding"] for one in found["data"]], wanted, atol=WITHIN)


def test_rankings(server: Oracle) -> None:
    found = post(server, "/rerank", {"query": QUERY, "documents": TEXTS, "model": "ranker"})
    wanted = server("ranker", "rerank", QUERY, TEXTS).ranking
    assert [one["index"] for one in found["results"]] == [one.index for one in wanted]


def test_labels(server: Oracle) -> None:
    found = post(server, "/classify", {"input": TEXTS, "model": "classifier"})
    wanted = server("classifier", "classify", TEXTS)
    assert_allclose([one["probs"] for one in found["data"]], wanted.scores, atol=WITHIN)
    assert found["labels"] == list(wanted.labels)


def test_readiness(server: Oracle) -> None:
    assert curl(f"{server.url}/ready")["ready"] is True
