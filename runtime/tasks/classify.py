"""The classify task: scores of each label for each input."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.card import Activation, ModelCard
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.requests import HYPOTHESIS, ClassifyRequest, Image, Output, Outputs
from staged_pool.runtime.results import ClassifyResult, Usage
from staged_pool.runtime.tasks.embed import array
from staged_pool.stages.errors import InvalidInput, Unsupported
from staged_pool.stages.work import Plan

LABELS_ONLY: Final[Outputs] = frozenset({Output.LABELS})


def plan(request: ClassifyRequest, card: ModelCard) -> Plan[ModelInput]:
    """Plan one model input for each input of the request.

    Raises:
        Unsupported: The model has no labels.
        InvalidInput: A setting of candidate labels is given without them.
    """
    if request.multi_label or request.hypothesis_template != HYPOTHESIS:
        name = "multi_label" if request.multi_label else "hypothesis_template"
        raise InvalidInput(f"${name} is for $candidate_labels, which are missing.", param=name)
    if Output.LABELS not in card.outputs:
        raise Unsupported(f"The model `{card.name}` has no labels to classify by.")
    inputs = [
        ModelInput(source, LABELS_ONLY, "" if isinstance(source, Image) else card.default_prompt)
        for source in request.inputs
    ]
    return Plan(inputs, partial(_finish, request, card))


def _finish(request: ClassifyRequest, card: ModelCard, rows: Sequence[object], tokens: int) -> ClassifyResult:
    logits = label_logits(rows)
    return ClassifyResult(
        scores=activated(logits, card.activation) if request.activate else logits,
        labels=card.labels,
        usage=Usage(tokens),
        model=card.name,
        logits=logits if request.activate else None,
    )


def label_logits(rows: Sequence[object]) -> NDArray[np.float32]:
    """Return the logits of rows: [rows, labels]."""
    return np.stack([array(row, Output.LABELS) for row in rows])


def activated(logits: NDArray[np.float32], activation: Activation) -> NDArray[np.float32]:
    """Apply an activation to [..., labels] logits.

    Sigmoid: 1 / (1 + exp(-x)). Softmax: exp(x) / sum(exp(x)).
    """
    if activation == "identity":
        return logits
    if activation == "sigmoid":
        scores = np.exp(-np.logaddexp(0.0, -logits, dtype=np.float32))  # exp(-x) itself would overflow
    else:
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores = powers / powers.sum(axis=-1, keepdims=True)
    return np.asarray(scores, np.float32)
