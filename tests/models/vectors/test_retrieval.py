"""Retrieval: real weights find what sentence-transformers finds, and scores of two texts are those that it gives."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import open_engine
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.folders.resolver import resolve
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.requests import ScoreRequest
from staged_pool.runtime.results import ScoreResult
from staged_pool.runtime.tasks.score import plan
from staged_pool.stages.work import Prepared
from tests.models import oracle
from tests.models.conftest import LoadTiny, TinyFolder
from tests.models.retrieval import PASSAGES, QUERIES
from tests.models.tiny import PROMPTED, write_json
from tests.models.vectors.test_oracle import Vectors, embed, normalised

Places = NDArray[np.intp]

CLOSE = 2e-5
QUESTIONS = [question for question, _ in QUERIES]
ANSWERS = [answer for _, answer in QUERIES]


def ranking(similarities: Vectors) -> Places:
    """[questions, passages]: places of passages, the best first."""
    return np.argsort(-similarities, axis=1, kind="stable")


def recall(ranked: Places, k: int) -> float:
    """For how many of the questions the answer is among the first `k`."""
    return float(np.mean([answer in row[:k] for answer, row in zip(ANSWERS, ranked, strict=True)]))


@pytest.fixture(scope="module")
def reference() -> Places:
    """Passages for each question as sentence-transformers ranks them, with the real weights in float32."""
    model = oracle.loaded("SentenceTransformer", resolve(None).folder)
    vectors = [model.encode(texts, show_progress_bar=False) for texts in (QUESTIONS, PASSAGES)]
    return ranking(model.similarity(*vectors).numpy())


@pytest.fixture(scope="module")
def minilm() -> Encoder:
    return load_model(EngineConfig(dtype="float32"))


def test_real_weights_rank_passages_as_sentence_transformers_does(minilm: Encoder, reference: Places) -> None:
    ranked = ranking(embed(minilm, QUESTIONS) @ embed(minilm, PASSAGES).T)
    assert ranked.tolist() == reference.tolist()
    assert [recall(ranked, k) for k in (1, 5)] == [recall(reference, k) for k in (1, 5)]


def test_real_weights_find_the_answers(minilm: Encoder) -> None:
    ranked = ranking(embed(minilm, QUESTIONS) @ embed(minilm, PASSAGES).T)
    assert recall(ranked, 1) >= 0.8
    assert recall(ranked, 5) >= 0.9


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with open_engine(EngineConfig()) as engine:
        yield engine


@pytest.mark.anyio
async def test_rerank_puts_the_answer_first(engine: Engine) -> None:
    best = []
    for question in QUESTIONS:
        result = await engine.rerank(question, PASSAGES, top_n=3)
        assert len(result.ranking) == 3
        assert result.ranking[0].score >= result.ranking[1].score >= result.ranking[2].score
        best.append(result.ranking[0].index)
    assert np.mean([place == answer for place, answer in zip(best, ANSWERS, strict=True)]) >= 0.8


def score(model: Encoder, queries: Sequence[str], documents: Sequence[str]) -> Vectors:
    """Scores as a client gets them."""
    planned = plan(ScoreRequest(queries=tuple(queries), documents=tuple(documents)), model.card)
    payloads = [p.payload for p in model.preprocess(planned.inputs) if isinstance(p, Prepared)]
    result = planned.finish(model.forward(payloads), 0)
    assert isinstance(result, ScoreResult)
    return result.scores


def similarities(
    folder: Path, queries: Sequence[str], documents: Sequence[str], *, prompt_name: str | None = None
) -> Vectors:
    """[queries, documents], of sentence-transformers. Vectors that it cuts are normalised again.

    It has an empty prompt `document` of its own, which hides one that a folder calls `passage` or `corpus`: such a
    one must be named.
    """
    model = oracle.loaded("SentenceTransformer", folder)
    vectors = [
        model.encode_query(list(queries), show_progress_bar=False),
        model.encode_document(list(documents), prompt_name=prompt_name, show_progress_bar=False),
    ]
    if type(model[-1]).__name__ == "Normalize":
        vectors = [normalised(some) for some in vectors]
    found: Vectors = model.similarity(*vectors).numpy()
    return found


@pytest.mark.parametrize("kind", [*PROMPTED, "xlmr-prompt", "bert-plain"])
def test_scores_are_similarities_of_texts_with_the_prompts_of_their_sides(
    kind: str, load_tiny: LoadTiny, tiny_folder: TinyFolder
) -> None:
    model, queries, documents = load_tiny(kind), QUESTIONS[:6], PASSAGES[:6]
    name = next((name for name in ("passage", "corpus") if name in model.card.prompts), None)
    wanted = similarities(tiny_folder(kind), queries, documents, prompt_name=name)
    assert np.abs(score(model, queries, documents) - np.diag(wanted)).max() <= CLOSE
    assert np.abs(score(model, queries[:1], documents) - wanted[0]).max() <= CLOSE


@pytest.mark.parametrize("function", ["cosine", "dot", "euclidean", "manhattan"])
@pytest.mark.parametrize("kind", ["gte-modernbert-mean", "bert-mean"])
def test_scores_are_what_the_folder_compares_vectors_with(
    kind: str, function: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder(kind), tmp_path / "model")
    settings: dict[str, Any] = {"similarity_fn_name": function, "prompts": {"query": "q: ", "corpus": "a text: "}}
    write_json(folder / "config_sentence_transformers.json", settings)
    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    assert model.card.similarity == function
    wanted = similarities(folder, QUESTIONS[:6], PASSAGES[:6], prompt_name="corpus")
    assert np.allclose(score(model, QUESTIONS[:6], PASSAGES[:6]), np.diag(wanted), rtol=1e-5, atol=CLOSE)
    assert np.allclose(score(model, QUESTIONS[:1], PASSAGES[:6]), wanted[0], rtol=1e-5, atol=CLOSE)
