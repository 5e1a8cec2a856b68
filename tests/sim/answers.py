"""The right answer of each client, computed from its items alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.payloads import SparseVector
from staged_pool.runtime.requests import Output
from staged_pool.runtime.results import ClassifyResult, EmbedResult, RerankResult, ScoreResult
from tests.sim.model import asked_for, logit, values_of
from tests.sim.world import ClientPlan, ItemPlan, Name, World, said

TOLERANCE = 1e-4
"""Tolerance of scores: they are sums of float32, which the engine may add up in another order."""


def wrong_answer(world: World, client: ClientPlan, result: object) -> str | None:
    """Explain a wrong result; None if it is right."""
    names = [said(client, index) for index in range(len(client.items))]
    match result:
        case EmbedResult():
            wrong = _wrong_vectors(world, client, names, result)
        case ClassifyResult():
            wrong = _differs(result.scores, np.array([[logit(name), -logit(name)] for name in names]))
        case ScoreResult():
            wrong = _differs(result.scores, np.array(scores(world, client, names)))
        case RerankResult():
            wrong = _wrong_ranking(result, scores(world, client, names))
        case _:
            return "a result of no task"
    tokens = sum(item.tokens * parts(world, client, item) for item in client.items)
    if wrong is None and (counted := result.usage.prompt_tokens) != tokens:
        return f"counts {counted} tokens instead of {tokens}"
    return wrong


def parts(world: World, client: ClientPlan, item: ItemPlan) -> int:
    """Return the number of parts that an item is cut into."""
    may_split = world.splits and client.task == "embed" and item.images != 1
    return item.parts if may_split else 1


def _wrong_vectors(world: World, client: ClientPlan, names: list[Name], result: EmbedResult) -> str | None:
    outputs = asked_for(world, client.task)
    for output, given in (
        (Output.DENSE, result.dense),
        (Output.SPARSE, result.sparse),
        (Output.MULTI_VECTOR, result.multi_vector),
    ):
        if (given is None) != (output not in outputs):
            return f"{output} was asked for, or given, and not both"
        if given is None:
            continue
        if len(given) != len(names):
            return f"{len(given)} rows of {output} for {len(names)} items"
        for row, name, item in zip(given, names, client.items, strict=True):
            if wrong := _wrong_row(world, output, row, (name, item, parts(world, client, item))):
                return wrong
    return None


def _wrong_row(world: World, output: Output, row: Any, of: tuple[Name, ItemPlan, int]) -> str | None:
    """Explain a row that is not that of an item cut into these parts; None if it is."""
    name, item, many = of
    if output is Output.SPARSE:
        want: Any = values_of(output, name, item.tokens, 0, world.width)
        return None if np.array_equal(row.values, want.values) else f"{row.values} instead of {want.values}"
    if output is Output.MULTI_VECTOR:
        whole = np.asarray(values_of(output, name, item.tokens, 0, world.width))
        return _differs(row, whole / np.maximum(np.linalg.norm(whole, axis=1, keepdims=True), 1e-12))
    each = [np.asarray(values_of(output, name, item.tokens, part, world.width)) for part in range(many)]
    return _differs(row, sum(each) / many)


def scores(world: World, client: ClientPlan, names: list[Name]) -> list[float]:
    """Score each document of a client against its query."""
    if world.model == "cross":
        return [logit(name) for name in names]
    queries, documents = names[: client.queries], names[client.queries :]
    token_counts = [item.tokens for item in client.items]
    pairs = [(place if client.queries > 1 else 0, place) for place in range(len(documents))]
    made = []
    for query, document in pairs:
        q = queries[query], token_counts[query]
        d = documents[document], token_counts[client.queries + document]
        made.append(_score(world, q, d))
    return made


def _score(world: World, query: tuple[Name, int], document: tuple[Name, int]) -> float:
    output = {"sparse": Output.SPARSE, "late": Output.MULTI_VECTOR}.get(world.model, Output.DENSE)
    q, d = (values_of(output, name, tokens, 0, 4) for name, tokens in (query, document))
    if isinstance(q, SparseVector) and isinstance(d, SparseVector):
        return _dot(q.values, d.values)
    if output is Output.DENSE:
        return _dot(np.asarray(q), np.asarray(d))
    return sum(max(_cosine(one, other) for other in np.asarray(d)) for one in np.asarray(q))


def _dot(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(a.astype(np.float64) @ b.astype(np.float64))


def _cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    lengths = math.hypot(*a.tolist()) * math.hypot(*b.tolist())
    return _dot(a, b) / lengths if lengths else 0.0


def _wrong_ranking(result: RerankResult, want: list[float]) -> str | None:
    if sorted(each.index for each in result.ranking) != list(range(len(want))):
        return "a document is missing in the ranking, or there twice"
    given = [each.score for each in result.ranking]
    if given != sorted(given, reverse=True):
        return f"a ranking of {given}"
    return _differs(np.array(given), np.array([want[each.index] for each in result.ranking]))


def _differs(got: Any, want: Any) -> str | None:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape == want.shape and np.allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE):
        return None
    return f"{_some(got)} instead of {_some(want)}"


def _some(values: NDArray[np.float64]) -> str:
    return f"{np.ravel(values)[:8].tolist()}"
