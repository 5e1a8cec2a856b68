"""Conversion of the answers of a call to results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from staged_pool.client import answers
from staged_pool.client.answers import decode, floats, in_order, integers, matrix
from staged_pool.client.errors import BadAnswer
from staged_pool.client.exchange import ServerAnswer
from staged_pool.client.results import EntitiesResult
from staged_pool.runtime.joining import join_usage
from staged_pool.runtime.payloads import SparseVector
from staged_pool.runtime.requests import Output
from staged_pool.runtime.results import ClassifyResult, EmbedResult, Entity, ScoreResult, Usage


def read_vectors(answer: ServerAnswer, count: int) -> EmbedResult:
    body = decode(answers.VECTORS, answer.body)
    rows = in_order(body.data, [entry.index for entry in body.data], count)
    return EmbedResult(
        dense=matrix([entry.embedding for entry in rows]), usage=Usage(body.usage.prompt_tokens), model=body.model
    )


def read_chunks(answer: ServerAnswer, count: int) -> EmbedResult:
    body = decode(answers.CHUNKED, answer.body)
    entries = in_order(body.data, [entry.index for entry in body.data], count)
    chunks = [entry.late_chunking.chunks for entry in entries]
    return EmbedResult(
        multi_vector=tuple(np.asarray(entry.embedding, np.float32) for entry in entries),
        offsets=tuple(_pairs([chunk.char_range or (0, 0) for chunk in each]) for each in chunks),
        chunks=tuple(_pairs([chunk.token_range for chunk in each]) for each in chunks),
        usage=Usage(body.usage.prompt_tokens),
        model=body.model,
    )


def _pairs(ranges: Sequence[tuple[int, int]]) -> NDArray[np.int32]:
    return np.array(ranges, np.int32).reshape(-1, 2)


def read_outputs(answer: ServerAnswer, count: int, outputs: frozenset[Output], *, offsets: bool = False) -> EmbedResult:
    body = decode(answers.POOLED, answer.body)
    entries = in_order(body.data, [entry.index for entry in body.data], count)
    rows = [entry.data for entry in entries]
    dense = [row.embed for row in rows if row.embed is not None]
    sparse = [SparseVector(integers(row.sparse.indices), floats(row.sparse.values)) for row in rows if row.sparse]
    multi = [np.asarray(row.token_embed, np.float32) for row in rows if row.token_embed is not None]
    weights = [floats(row.token_classify) for row in rows if row.token_classify is not None]
    lists: dict[Output, Sequence[object]] = {
        Output.DENSE: dense,
        Output.SPARSE: sparse,
        Output.MULTI_VECTOR: multi,
        Output.TOKEN_WEIGHTS: weights,
    }
    for output, found in lists.items():
        if output in outputs and len(found) != count:
            raise BadAnswer(f"The answer lacks the output {output.value} of {count - len(found)} inputs")
    return EmbedResult(
        dense=matrix(dense) if Output.DENSE in outputs else None,
        sparse=tuple(sparse) if Output.SPARSE in outputs else None,
        multi_vector=tuple(multi) if Output.MULTI_VECTOR in outputs else None,
        token_weights=tuple(weights) if Output.TOKEN_WEIGHTS in outputs else None,
        offsets=tuple(_offsets(entry.offsets) for entry in entries) if offsets else None,
        usage=Usage(body.usage.prompt_tokens),
        model=body.model,
    )


def _offsets(given: answers.OffsetsObject | None) -> NDArray[np.int32] | None:
    """Return the characters of each token of one input; None if it is no text.

    Raises:
        BadAnswer: The answer has no offsets, or something else in their place.
    """
    if given is None:
        raise BadAnswer("The answer lacks the offsets of an input")
    if given.token_embed is None:
        return None
    if any(len(pair) != 2 for pair in given.token_embed):
        raise BadAnswer("The answer has offsets that are not pairs of numbers")
    return np.array(given.token_embed, np.int32).reshape(-1, 2)


def read_labels(answer: ServerAnswer, count: int) -> ClassifyResult:
    body = decode(answers.LABELS, answer.body)
    rows = in_order(body.data, [entry.index for entry in body.data], count)
    return ClassifyResult(
        scores=matrix([entry.probs for entry in rows]),
        labels=tuple(body.labels),
        usage=Usage(body.usage.prompt_tokens),
        model=body.model,
    )


def read_entities(answer: ServerAnswer, count: int) -> EntitiesResult:
    body = decode(answers.ENTITIES, answer.body)
    rows = in_order(body.data, [entry.index for entry in body.data], count)
    entities = tuple(
        tuple(Entity(found.label, found.score, found.start, found.end, found.text) for found in entry.entities)
        for entry in rows
    )
    return EntitiesResult(entities, Usage(body.usage.prompt_tokens), body.model)


def join_entities(parts: Sequence[EntitiesResult]) -> EntitiesResult:
    return EntitiesResult(
        tuple(row for part in parts for row in part.entities), join_usage(part.usage for part in parts), parts[0].model
    )


def read_scores(answer: ServerAnswer, count: int) -> ScoreResult:
    body = decode(answers.SCORES, answer.body)
    rows = in_order(body.data, [entry.index for entry in body.data], count)
    scores = np.array([entry.score for entry in rows], np.float32)
    logits = [entry.logit for entry in rows if entry.logit is not None]
    return ScoreResult(
        scores=scores,
        usage=Usage(body.usage.prompt_tokens),
        model=body.model,
        logits=np.array(logits, np.float32) if len(logits) == count else None,
    )
