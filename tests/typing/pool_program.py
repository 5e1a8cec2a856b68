"""A program with a pool, checked and never run."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

import staged_pool


def program() -> None:
    with staged_pool.Pool("folder", backend="trio", device="cpu", preprocess_limit=2) as pool:
        assert_type(pool, staged_pool.Pool)
        result = pool.embed(["a query", "a passage"], dimensions=2, timeout_s=1.0, progress=True)
        assert_type(result, staged_pool.EmbedResult)
        assert_type(pool.embed("a", outputs=["dense", "sparse"], priority="bulk", tenant=3), staged_pool.EmbedResult)
        assert_type(pool.classify([("a", "b")], activate=False), staged_pool.ClassifyResult)
        assert_type(pool.embed("a", outputs="sparse", max_active_dims=9), staged_pool.EmbedResult)
        assert_type(pool.classify("a", candidate_labels=["b", "c"], multi_label=True), staged_pool.ClassifyResult)
        pool.classify_tokens("a", candidate_labels=["b"])  # type: ignore[call-arg]
        assert_type(pool.classify_tokens("a", aggregation="first"), staged_pool.TokenClassifyResult)
        assert_type(pool.score("query", ["a", "b"], instruction="a match"), staged_pool.ScoreResult)
        assert_type(pool.rerank("query", ["a"], top_n=1).ranking, tuple[staged_pool.Ranked, ...])
        assert_type(pool.tokenize("a"), staged_pool.Tokens)
        assert_type(pool.card, staged_pool.ModelCard)
        assert_type(pool.statistics(), staged_pool.EngineStatistics)
        pool.embed("a", dimensions="8")  # type: ignore[arg-type]
        pool.embed("a", dimension=8)  # type: ignore[call-arg]
        pool.classify("a", progress=lambda done, total: print(done / total))
    staged_pool.Pool(Path("folder"), backend="curio")  # type: ignore[arg-type]


def streaming_program(pool: staged_pool.Pool, texts: Iterator[str]) -> None:
    stream = pool.embed_stream(texts, ordered=False, prompt_name="query")
    assert_type(stream, staged_pool.ResultStream[NDArray[np.float32]])
    for index, vector in stream:
        assert_type(index, int)
        assert_type(vector, NDArray[np.float32])
    assert_type(stream.usage, staged_pool.Usage | None)
    with pool.score_stream((text, "document") for text in texts) as scores:
        assert_type(next(scores), tuple[int, float])
    assert_type(next(pool.classify_stream(texts)), tuple[int, NDArray[np.float32]])


def program_of_futures(pool: staged_pool.Pool) -> None:
    assert_type(pool.submit(lambda engine: engine.embed("a")), Future[staged_pool.EmbedResult])
    assert_type(pool.call(lambda engine: engine.tokenize("a")), staged_pool.Tokens)


def program_of_sentence_transformers(pool: staged_pool.Pool) -> None:
    assert_type(pool.encode("a"), NDArray[Any])
    assert_type(pool.encode(["a", "b"], batch_size=64, truncate_dim=8, precision="int8"), NDArray[Any])
    assert_type(pool.encode(["a"], convert_to_tensor=True, show_progress_bar=True), Tensor)
    assert_type(pool.encode(["a"], convert_to_numpy=False), list[Tensor])
    assert_type(pool.encode_query("a", prompt="query: "), NDArray[Any])
    assert_type(pool.encode_document(["a"], convert_to_tensor=True), Tensor)
    pool.encode(["a"], precision="int4")  # type: ignore[call-overload]
    pool.encode(["a"], normalise=True)  # type: ignore[call-overload]
    pool.predict([("query", "document")], activation_fn=lambda logits: logits.tanh())
    for ranked in pool.rank("query", ["a", "b"], return_documents=True):
        assert_type(ranked["corpus_id"], int)
