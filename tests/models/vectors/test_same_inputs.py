"""Results of real models with inputs that are the same: as they are where each goes through the device by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import open_engine
from staged_pool.runtime.payloads import SparseVector
from staged_pool.runtime.requests import (
    MODEL_MAX,
    Chat,
    ClassifyRequest,
    EmbedRequest,
    Image,
    Output,
    ScoreRequest,
    TextInput,
    TokenClassifyRequest,
)
from staged_pool.stages.work import Request
from tests.models.conftest import TinyFolder
from tests.models.encoded_images import encode

pytestmark = pytest.mark.anyio

CLOSE = 1e-4
SENTENCE, OTHER = "A man is eating food.", "The stock market fell sharply today."
LONG = f"{SENTENCE} {OTHER} " * 60
WIDE, TALL = Image(encode(100, 80)), Image(encode(70, 150, "PNG", 1))
BOTH = TextInput(Chat(({"role": "user", "content": ("it is", WIDE)},)), add_special_tokens=False)


def texts(*sources: str, max_tokens: int | None = MODEL_MAX) -> tuple[TextInput, ...]:
    return tuple(TextInput(source, max_tokens=max_tokens) for source in sources)


def score(*documents: str | Image, query: str = SENTENCE, **others: Any) -> ScoreRequest:
    return ScoreRequest(queries=(query,), documents=documents, max_tokens=MODEL_MAX, **others)


REQUESTS: dict[str, Sequence[Request]] = {
    "bge-m3": [
        EmbedRequest(inputs=texts(SENTENCE, OTHER, SENTENCE, LONG, LONG)),
        EmbedRequest(inputs=texts(SENTENCE, LONG, max_tokens=7)),
        EmbedRequest(inputs=texts(SENTENCE), outputs=frozenset({Output.SPARSE, Output.MULTI_VECTOR})),
        EmbedRequest(inputs=texts(SENTENCE, OTHER), outputs=frozenset({Output.MULTI_VECTOR}), normalize=False),
        EmbedRequest(inputs=texts(SENTENCE), normalize=False),
        EmbedRequest(inputs=(TextInput(SENTENCE, add_special_tokens=False), TextInput((5, 6, 7)))),
        EmbedRequest(inputs=(TextInput(LONG, max_tokens=9, truncate_side="left"),)),
        score(OTHER, SENTENCE, OTHER),
    ],
    "e5-xlmr": [
        EmbedRequest(inputs=texts(SENTENCE, SENTENCE)),
        EmbedRequest(inputs=texts(SENTENCE), prompt_name="query"),
        EmbedRequest(inputs=texts(SENTENCE), prompt_name="passage"),
        EmbedRequest(inputs=texts(SENTENCE), prompt="query: "),
        score(SENTENCE, OTHER),
    ],
    "ce-bert-1label": [
        score(OTHER, SENTENCE, OTHER),
        score(OTHER, query=OTHER),
        score(SENTENCE, query=OTHER),
        score(LONG, OTHER, max_document_tokens=5),
        replace(score(OTHER), activate=False),
    ],
    "seqcls-multiclass": [
        ClassifyRequest(inputs=texts(SENTENCE, OTHER, SENTENCE)),
        ClassifyRequest(inputs=texts(SENTENCE), activate=False),
    ],
    "tokcls-ner": [
        TokenClassifyRequest(inputs=texts(SENTENCE, f"  {SENTENCE}", SENTENCE, SENTENCE.replace(" ", "   "))),
        TokenClassifyRequest(inputs=texts(SENTENCE), aggregation="none", activate=False),
        TokenClassifyRequest(inputs=(TextInput((5, 6, 7)), TextInput((5, 6, 7)))),
    ],
    "colbert-pylate": [
        EmbedRequest(inputs=texts(SENTENCE, SENTENCE), outputs=frozenset({Output.MULTI_VECTOR}), prompt_name="query"),
        EmbedRequest(inputs=texts(SENTENCE), outputs=frozenset({Output.MULTI_VECTOR}), prompt_name="document"),
        score(SENTENCE, OTHER, SENTENCE),
    ],
    "clip": [
        EmbedRequest(inputs=(WIDE, *texts(SENTENCE), TALL, WIDE)),
        EmbedRequest(inputs=(WIDE,), normalize=False),
        score(WIDE, TALL, SENTENCE, WIDE),
    ],
    "qwen2-vl": [
        EmbedRequest(inputs=(WIDE, BOTH, *texts(SENTENCE), BOTH, TALL)),
        EmbedRequest(inputs=(BOTH, TALL)),
    ],
}
"""By kinds of models: what several callers ask at once. Much of it is the same, or nearly."""


@pytest.fixture(scope="module", params=REQUESTS)
def kind(request: pytest.FixtureRequest, tiny_folder: TinyFolder) -> tuple[Path, Sequence[Request]]:
    """Built before the event loop runs, which must not be blocked."""
    return tiny_folder(request.param), REQUESTS[request.param]


async def ask_at_once(engine: Engine, requests: Sequence[Request]) -> list[object]:
    results: dict[int, object] = {}

    async def ask(place: int) -> None:
        results[place] = await engine.submit(lambda: requests[place], lambda result: result)

    async with anyio.create_task_group() as tasks:
        for place in range(len(requests)):
            tasks.start_soon(ask, place)
    return [results[place] for place in range(len(requests))]


def differs(one: object, other: object, *, by: float) -> str | None:
    """Name a value of two results that differs by more than `by`; None if none does."""
    if isinstance(one, SparseVector) and isinstance(other, SparseVector):
        return differs((one.indices, one.values), (other.indices, other.values), by=by)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        same = one.shape == other.shape and one.dtype == other.dtype and np.abs(one - other).max(initial=0.0) <= by
        return None if same else f"{one} {other}"
    if isinstance(one, float) and isinstance(other, float):
        return None if abs(one - other) <= by else f"{one} {other}"
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return next((found for pair in zip(one, other, strict=True) if (found := differs(*pair, by=by))), None)
    if type(one) is type(other) and hasattr(one, "__dataclass_fields__"):
        names = [field.name for field in fields(one)]  # type: ignore[arg-type]  # mypy knows no such guard
        pair = tuple(tuple(getattr(result, name) for name in names) for result in (one, other))
        return differs(*pair, by=by)
    return None if one == other else f"{one} {other}"


async def test_results_are_those_of_inputs_that_go_one_by_one(kind: tuple[Path, Sequence[Request]]) -> None:
    folder, requests = kind
    plain = EngineConfig(model=str(folder), dtype="float32", torch_threads=1, coalesce=False)
    async with open_engine(plain) as engine:
        wanted = [(await ask_at_once(engine, [request]))[0] for request in requests]
    async with open_engine(replace(plain, coalesce=True)) as engine:
        coalesced = await ask_at_once(engine, [*requests] * 3)
        shared = engine.statistics().device.coalesced_items
    async with open_engine(replace(plain, coalesce=True, result_cache_mb=10)) as engine:
        first = await ask_at_once(engine, requests)
        before = engine.statistics().device.items
        again = await ask_at_once(engine, requests)
        assert engine.statistics().device.items == before
    assert shared > 0
    for place, result in enumerate(coalesced):
        assert not (found := differs(result, wanted[place % len(requests)], by=CLOSE)), found
    for fresh, kept, alone in zip(first, again, wanted, strict=True):
        assert not (found := differs(fresh, alone, by=CLOSE)), found
        assert not (found := differs(fresh, kept, by=0.0)), found
