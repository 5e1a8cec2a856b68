"""Ask a loaded model without an engine: plan, preprocess, forward, result."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from staged_pool.runtime.model import Row, TokenSequence
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.text_tower import TextTower
from staged_pool.runtime.requests import MODEL_MAX, EmbedRequest, Output, ScoreRequest, TextInput
from staged_pool.runtime.results import EmbedResult, ScoreResult
from staged_pool.runtime.tasks.plan import plan
from staged_pool.stages.work import Prepared, Request


def text_tower(model: Encoder) -> TextTower:
    """Its parts, for a test that looks inside."""
    tower = model.towers["text"]
    assert isinstance(tower, TextTower)
    return tower


def embed(
    model: Encoder,
    texts: Sequence[str],
    *outputs: Output,
    alone: bool = False,
    max_tokens: int | None = MODEL_MAX,
    **others: Any,
) -> EmbedResult:
    """Vectors of texts, in one batch or each alone."""
    request = EmbedRequest(
        inputs=tuple(TextInput(text, max_tokens) for text in texts), outputs=frozenset(outputs), **others
    )
    result: EmbedResult = _answer(model, request, alone=alone)
    return result


def score(model: Encoder, query: str, documents: Sequence[str]) -> ScoreResult:
    """How well documents answer a query."""
    result: ScoreResult = _answer(
        model, ScoreRequest(queries=(query,), documents=tuple(documents), max_tokens=MODEL_MAX), alone=False
    )
    return result


def sequences(model: Encoder, request: Request) -> list[TokenSequence]:
    """What the device would read. An input that is wrong raises what is wrong with it."""
    found = []
    for prepared in model.preprocess(plan(request, model.card).inputs):
        if isinstance(prepared, Exception):
            raise prepared
        assert isinstance(prepared, Prepared)
        assert isinstance(prepared.payload, TokenSequence)
        found.append(prepared.payload)
    return found


def _answer(model: Encoder, request: Request, *, alone: bool) -> Any:
    payloads = sequences(model, request)
    batches: Iterable[list[TokenSequence]] = [[each] for each in payloads] if alone else [payloads]
    rows = list(itertools.chain.from_iterable(model.forward(batch) for batch in batches))
    assert all(isinstance(row, Row) for row in rows)
    return plan(request, model.card).finish(rows, sum(len(each.ids) for each in payloads))
