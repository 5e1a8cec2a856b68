"""JavaScript clients in Node: what each reads from an answer equals what the engine says in process.

`make clients` installs their packages. One program calls all of them, as starting Node and loading them takes seconds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from numpy.testing import assert_allclose

from tests.clients.conftest import KEY, QUERY, TEXTS, WITHIN, Oracle
from tests.packaging.floors import ROOT

HERE: Final = Path(__file__).parent / "javascript"
PACKAGES: Final = ROOT / ".venv" / "javascript" / "node_modules"
NAMES: Final = ("@huggingface/inference", "@langchain/openai", "ai", "cohere-ai", "ollama", "openai", "voyageai")
"""Packages of which each has a call at least."""

pytestmark = pytest.mark.skipif(
    not PACKAGES.is_dir() or shutil.which("node") is None, reason="a package of make clients"
)

VECTORS: Final = (
    "openai, base64",
    "openai, floats",
    "ai",
    "cohere-ai, vectors",
    "ollama",
    "voyageai, vectors",
    "@huggingface/inference, vectors",
    "@langchain/openai",
)


@pytest.fixture(scope="module")
def results(server: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Results of all calls, by name."""
    folder = tmp_path_factory.mktemp("javascript")
    program = folder / "calls.mjs"  # Node looks for packages beside the program
    program.write_bytes((HERE / "calls.mjs").read_bytes())
    (folder / "node_modules").symlink_to(PACKAGES)
    given = json.dumps({"url": server.url, "key": KEY, "texts": TEXTS, "query": QUERY})
    ran = subprocess.run(["node", program, given], capture_output=True, text=True, timeout=120, check=True)
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    return {line["name"]: line for line in lines}


def result(results: Mapping[str, Any], name: str) -> Any:
    assert "error" not in results[name], results[name]["error"]
    return results[name]["result"]


@pytest.mark.parametrize("name", VECTORS)
def test_vectors(results: Mapping[str, Any], server: Oracle, name: str) -> None:
    assert_allclose(result(results, name), server("embedder", "embed", TEXTS).embeddings, atol=WITHIN)


def test_one_vector(results: Mapping[str, Any], server: Oracle) -> None:
    assert_allclose(result(results, "ai, one"), server("embedder", "embed", TEXTS[:1]).embeddings, atol=WITHIN)


@pytest.mark.parametrize("name", ["cohere-ai, ranking", "voyageai, ranking"])
def test_rankings(results: Mapping[str, Any], server: Oracle, name: str) -> None:
    wanted = server("ranker", "rerank", QUERY, TEXTS)
    found = result(results, name)
    assert [index for index, _ in found] == [one.index for one in wanted.ranking]
    assert_allclose([score for _, score in found], [one.score for one in wanted.ranking], atol=WITHIN)


def test_labels(results: Mapping[str, Any], server: Oracle) -> None:
    wanted = server("classifier", "classify", TEXTS[:1])
    found = result(results, "@huggingface/inference, labels")
    best = wanted.scores[0].argsort()[::-1][:2]
    assert [one["label"] for one in found] == [wanted.labels[place] for place in best]
    assert_allclose([one["score"] for one in found], wanted.scores[0][best], atol=WITHIN)


def test_an_error_is_of_the_clients_own_class(results: Mapping[str, Any]) -> None:
    assert result(results, "openai, an error") == {"known": True, "status": 404, "param": "model"}


def test_each_package_has_a_call(results: Mapping[str, Any]) -> None:
    asked = json.loads((HERE / "package.json").read_text())["dependencies"].keys()
    assert set(NAMES) <= asked
    assert {name.partition(",")[0] for name in results} == set(NAMES)
