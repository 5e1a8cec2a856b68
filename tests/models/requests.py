"""Ask a loaded model without an engine: plan, preprocess, forward, result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.towers.text import TextTower
from staged_pool.runtime.payloads import Payload, Row, TokenSequence
from staged_pool.runtime.requests import (
    MODEL_MAX,
    Chat,
    ClassifyRequest,
    Content,
    EmbedRequest,
    Image,
    Output,
    ScoreRequest,
    TextInput,
)
from staged_pool.runtime.results import ClassifyResult, EmbedResult, ScoreResult
from staged_pool.runtime.tasks.plan import plan
from staged_pool.stages.work import Prepared, Request


def text_tower(model: Encoder) -> TextTower:
    """Its parts, for a test that looks inside."""
    tower = model.towers["text"]
    assert isinstance(tower, TextTower)
    return tower


def embed(
    model: Encoder,
    inputs: Sequence[str | Image],
    *outputs: Output,
    alone: bool = False,
    max_tokens: int | None = MODEL_MAX,
    **others: Any,
) -> EmbedResult:
    """Return vectors of texts and images; inputs of a batch key in one batch, or each alone."""
    sources = tuple(one if isinstance(one, Image) else TextInput(one, max_tokens) for one in inputs)
    request = EmbedRequest(inputs=sources, outputs=frozenset(outputs), **others)
    result: EmbedResult = result_of(model, request, alone=alone)
    return result


def classify(
    model: Encoder, inputs: Sequence[Image | TextInput], *, alone: bool = False, **others: Any
) -> ClassifyResult:
    """Return scores of labels for images or texts."""
    result: ClassifyResult = result_of(model, ClassifyRequest(inputs=tuple(inputs), **others), alone=alone)
    return result


def score(model: Encoder, query: Content, documents: Sequence[Content]) -> ScoreResult:
    """Return scores of documents for a query."""
    result: ScoreResult = result_of(
        model, ScoreRequest(queries=(query,), documents=tuple(documents), max_tokens=MODEL_MAX)
    )
    return result


def content(parts: Sequence[str | bytes]) -> Content:
    """Return a query or a document of texts and images: itself, or a message with all of them."""
    match parts:
        case [str(text)]:
            return text
        case [bytes(image)]:
            return Image(image)
    given = tuple(Image(part) if isinstance(part, bytes) else part for part in parts)
    return Chat(({"role": "user", "content": given},))


def sequences(model: Encoder, request: Request) -> list[TokenSequence]:
    """Return the device's input for texts. A wrong input raises its error."""
    found = []
    for prepared in prepare(model, request):
        assert isinstance(prepared.payload, TokenSequence)
        found.append(prepared.payload)
    return found


def prepare(model: Encoder, request: Request) -> list[Prepared[Payload]]:
    """Prepare every input of a request for the device. A wrong input raises its error."""
    inputs = plan(request, model.card).inputs
    found: dict[int, Prepared[Payload]] = {}
    for lane in ("text", "image"):
        places = [place for place, given in enumerate(inputs) if given.lane == lane]
        for place, outcome in zip(places, model.preprocess([inputs[place] for place in places]), strict=True):
            if isinstance(outcome, Exception):
                raise outcome
            assert isinstance(outcome, Prepared)
            found[place] = outcome
    return [found[place] for place in range(len(inputs))]


def result_of(model: Encoder, request: Request, *, alone: bool = False) -> Any:
    """Return the result of a request; inputs of a batch key in one batch, or each alone."""
    prepared = prepare(model, request)
    batches: dict[object, list[int]] = {}
    for place, one in enumerate(prepared):
        batches.setdefault(place if alone else one.batch_key, []).append(place)
    rows: dict[int, Row] = {}
    for places in batches.values():
        for place, row in zip(places, model.forward([prepared[p].payload for p in places]), strict=True):
            assert isinstance(row, Row)
            rows[place] = row
    in_order = [rows[place] for place in range(len(prepared))]
    return plan(request, model.card).finish(in_order, sum(one.tokens for one in prepared))
