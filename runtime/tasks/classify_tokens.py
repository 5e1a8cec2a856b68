"""The token classification task: the label of each token, and entities."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, cast, get_args

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.payloads import Row, TokenSequence
from staged_pool.runtime.requests import Aggregation, Output, Outputs, TokenClassifyRequest
from staged_pool.runtime.results import TokenClassifyResult, Usage
from staged_pool.runtime.spans import Span
from staged_pool.runtime.tasks.classify import activated
from staged_pool.runtime.tasks.embed import array, offsets, owned
from staged_pool.runtime.tasks.entities import entities, steps
from staged_pool.stages.errors import InvalidInput, Unsupported
from staged_pool.stages.work import Plan

_TOKEN_LABELS_ONLY: Final[Outputs] = frozenset({Output.TOKEN_LABELS})
_AGGREGATIONS: Final[tuple[str, ...]] = get_args(Aggregation)


def plan(request: TokenClassifyRequest, card: ModelCard) -> Plan[ModelInput]:
    """Plan one model input for each input of the request.

    Raises:
        Unsupported: The model has no labels for tokens.
        InvalidInput: There is no such aggregation.
    """
    if Output.TOKEN_LABELS not in card.outputs:
        raise Unsupported(f"The model `{card.name}` has no labels to classify tokens by.")
    if request.aggregation not in _AGGREGATIONS:
        raise InvalidInput(f"$aggregation must be one of {', '.join(_AGGREGATIONS)}.", param="aggregation")
    inputs = [ModelInput(source, _TOKEN_LABELS_ONLY, card.default_prompt) for source in request.inputs]
    return Plan(inputs, partial(_finish, request, card))


def _finish(request: TokenClassifyRequest, card: ModelCard, rows: Sequence[object], tokens: int) -> TokenClassifyResult:
    logits = [array(row, Output.TOKEN_LABELS) for row in rows]
    probabilities: list[NDArray[np.float32]] = [activated(of_tokens, "softmax") for of_tokens in logits]
    found = [
        steps(given.source, offsets(cast(Row, row)), scores, card.labels)
        if card.labels_steps
        else entities(given.source, _spans(row), scores, card.labels, request.aggregation)
        for given, row, scores in zip(request.inputs, rows, probabilities, strict=True)
    ]
    return TokenClassifyResult(
        scores=tuple(probabilities if request.activate else map(owned, logits)),
        entities=tuple(found),
        offsets=tuple(offsets(cast(Row, row)) for row in rows),
        labels=card.labels,
        usage=Usage(tokens),
        model=card.name,
    )


def _spans(row: object) -> tuple[Span, ...] | None:
    return cast(TokenSequence, cast(Row, row).payload).spans
