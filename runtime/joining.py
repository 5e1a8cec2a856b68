"""Joins of the results of several requests to the result of one call. Pure.

Each function takes at least one result, in the order of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.results import ClassifyResult, EmbedResult, ScoreResult, TokenClassifyResult, Usage


def join_vectors(parts: Sequence[EmbedResult]) -> EmbedResult:
    """Join vectors of all kinds."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return EmbedResult(
        dense=None if first.dense is None else np.concatenate([part.embeddings for part in parts]),
        sparse=None if first.sparse is None else tuple(row for part in parts for row in part.sparse or ()),
        multi_vector=(
            None if first.multi_vector is None else tuple(row for part in parts for row in part.multi_vector or ())
        ),
        token_weights=(
            None if first.token_weights is None else tuple(row for part in parts for row in part.token_weights or ())
        ),
        offsets=(None if first.offsets is None else tuple(row for part in parts for row in part.offsets or ())),
        chunks=(None if first.chunks is None else tuple(row for part in parts for row in part.chunks or ())),
        usage=join_usage(part.usage for part in parts),
        model=first.model,
    )


def join_labels(parts: Sequence[ClassifyResult]) -> ClassifyResult:
    """Join scores of labels."""
    return ClassifyResult(
        scores=np.concatenate([part.scores for part in parts]),
        labels=parts[0].labels,
        usage=join_usage(part.usage for part in parts),
        model=parts[0].model,
        logits=_join_logits([part.logits for part in parts]),
    )


def join_token_labels(parts: Sequence[TokenClassifyResult]) -> TokenClassifyResult:
    """Join scores of the labels of tokens, and entities."""
    return TokenClassifyResult(
        scores=tuple(row for part in parts for row in part.scores),
        entities=tuple(row for part in parts for row in part.entities),
        offsets=None if parts[0].offsets is None else tuple(row for part in parts for row in part.offsets or ()),
        labels=parts[0].labels,
        usage=join_usage(part.usage for part in parts),
        model=parts[0].model,
    )


def join_scores(parts: Sequence[ScoreResult]) -> ScoreResult:
    """Join scores of documents."""
    return ScoreResult(
        scores=np.concatenate([part.scores for part in parts]),
        usage=join_usage(part.usage for part in parts),
        model=parts[0].model,
        logits=_join_logits([part.logits for part in parts]),
    )


def join_usage(parts: Iterable[Usage]) -> Usage:
    """Add up the tokens of several requests."""
    return Usage(sum(part.prompt_tokens for part in parts))


def _join_logits(parts: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if len(known) == len(parts) else None
