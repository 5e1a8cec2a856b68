"""Errors and results go through pools of processes, queues and caches: all of them survive pickle and copy."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, Final

import numpy as np
import pytest

import staged_pool
import staged_pool.client
import staged_pool.runtime
import staged_pool.stages
from staged_pool.client import EntitiesResult, Readiness, RetryPolicy, ServedModel, TokensResult
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.payloads import Row, SparseVector, TokenSequence
from staged_pool.runtime.pipelines.items import Embedding, ItemError, Labelled, PipelineItem, PipelineResult
from staged_pool.runtime.pipelines.statistics import PipelineStageStatistics, PipelineStatistics
from staged_pool.runtime.plugins.processor import ModelInputs
from staged_pool.runtime.requests import (
    Chat,
    ClassifyRequest,
    EmbedRequest,
    Image,
    Output,
    PairInput,
    ScoreRequest,
    TextInput,
    TokenClassifyRequest,
    Video,
)
from staged_pool.runtime.results import (
    ClassifyResult,
    EmbedResult,
    Entity,
    Ranked,
    RerankResult,
    ScoreResult,
    TokenClassifyResult,
    Usage,
)
from staged_pool.runtime.tokens import Tokens
from staged_pool.stages.errors import DeadlineExceeded, InvalidInput, StagedPoolError
from staged_pool.stages.meter import HistogramSnapshot
from tests.servers.engines import engine_on
from tests.support.cards import CARD
from tests.support.model import LetterModel


def _import_all() -> None:
    for package in (staged_pool.client, staged_pool.runtime, staged_pool.stages):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)


def _errors(kind: type[StagedPoolError] = StagedPoolError) -> Iterator[type[StagedPoolError]]:
    yield kind
    for each in kind.__subclasses__():
        if each.__module__.startswith("staged_pool."):
            yield from _errors(each)


_import_all()
ERRORS: Final = sorted({*_errors()}, key=lambda kind: kind.__qualname__)

VALUES: Final[dict[str, Any]] = {
    "message": "The cause, and $dimensions.",
    "param": "input",
    "index": 3,
    "retry_after_s": 1.5,
    "stage": "parse",
    "status": 599,
    "plugin": "codes",
    "hook": "parse",
}
"""Values of the arguments of errors, by name."""


def made(kind: type[StagedPoolError]) -> StagedPoolError:
    signature = inspect.signature(kind.__init__)
    named = {name: VALUES[name] for name in signature.parameters if name in VALUES and name != "message"}
    error = kind(VALUES["message"], **named)
    error.add_note("a note")
    return error


def _pickled(protocol: int, value: Any) -> Any:
    return pickle.loads(pickle.dumps(value, protocol))


WAYS: Final[dict[str, Callable[[Any], Any]]] = {
    **{f"pickle {number}": partial(_pickled, number) for number in (0, 2, 5)},
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__qualname__)
def test_each_error_survives_with_its_type_text_and_fields(kind: type[StagedPoolError], way: str) -> None:
    error = made(kind)
    twin = WAYS[way](error)
    assert type(twin) is kind
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)
    assert twin.args == error.args
    if isinstance(error, InvalidInput):
        assert isinstance(twin, InvalidInput)
        assert twin.with_prefix("x").index == error.with_prefix("x").index


def _fail(_: int) -> None:
    raise DeadlineExceeded("Too late", stage="parse", retry_after_s=2.5)


def test_an_error_in_a_pool_of_processes_is_the_callers() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.raises(DeadlineExceeded, match="Too late") as caught:
            pool.submit(_fail, 1).result()
        assert (caught.value.stage, caught.value.retry_after_s) == ("parse", 2.5)
        assert pool.submit(abs, -1).result() == 1  # the pool is not broken


_ARRAY: Final = np.array([[1.0, 2.0]], np.float32)
_SPARSE: Final = SparseVector(np.array([3], np.int32), np.array([0.5], np.float32))
_OF_ALL: Final[dict[str, Any]] = {"usage": Usage(3), "model": "letters"}
_ENTITIES: Final = ((Entity("X", 0.5, 0, 1, "a"),),)
_ITEM: Final = PipelineItem(index=0, parts=(1,), value={"a": 1})
_ITEM_ERROR: Final = ItemError(index=1, stage="embed", error=InvalidInput("wrong", param="input", index=1))
_HISTOGRAM: Final = HistogramSnapshot((1, 2), 3.0)
_STAGE: Final = PipelineStageStatistics(
    name="embed", window=1, in_flight=1, waiting=0, done=3, skipped=0, failed=0, wait=_HISTOGRAM, service=_HISTOGRAM
)

EXAMPLES: Final[tuple[Any, ...]] = (
    CARD,
    ClassifyRequest(inputs=(PairInput(first="a", second="b"),)),
    ClassifyResult(scores=_ARRAY, labels=("a", "b"), **_OF_ALL),
    EmbedRequest(inputs=(TextInput("a"), Image(b"a", {"max_pixels": 3}))),
    EmbedResult(dense=_ARRAY, sparse=(_SPARSE,), multi_vector=(_ARRAY,), **_OF_ALL),
    Embedding(dense=_ARRAY, sparse=_SPARSE),
    EngineConfig(model="a"),
    EntitiesResult(_ENTITIES, **_OF_ALL),
    Entity("X", 0.5, 0, 1, "a"),
    Chat(({"role": "user", "content": ("a", Image("http://127.0.0.1/a"))},)),
    Image(b"a"),
    _ITEM_ERROR,
    Labelled(label="a", score=0.5, scores={"a": 0.5}),
    ModelInputs(inputs=("a",), outputs=("dense",)),
    PairInput(first="a", second="b"),
    _ITEM,
    PipelineResult(items=(_ITEM,), errors=(_ITEM_ERROR,), usage=Usage(3), stage_s={"embed": 0.5}),
    PipelineStatistics(
        name="x",
        requests=1,
        max_requests=2,
        window=3,
        in_flight=1,
        waiting=0,
        outcomes={"answered": 1},
        left=0,
        drain_s=0.0,
        stages=(_STAGE,),
    ),
    Ranked(0, 0.5),
    Readiness(ready=False, reason="loading"),
    RerankResult(ranking=(Ranked(0, 0.5),), **_OF_ALL),
    RetryPolicy(),
    Row({Output.DENSE: _ARRAY}, TokenSequence([1], frozenset({Output.DENSE}))),
    ScoreRequest(queries=("a",), documents=("b",)),
    ScoreResult(scores=_ARRAY[0], **_OF_ALL),
    ServedModel("letters", 512, {"width": 4}),
    _SPARSE,
    TextInput("a", 3),
    TokenClassifyRequest(inputs=(TextInput("a"),)),
    TokenClassifyResult(scores=(_ARRAY,), entities=_ENTITIES, labels=("O", "X"), **_OF_ALL),
    Tokens([1], ["a"], [(0, 1)]),
    TokensResult((1,), ("a",)),
    Usage(3),
    Video.of_frames([b"a", b"b"], fps=2.0),
)
"""One value of each exported type."""

_OF_A_PROCESS: Final = {"Engine", "EngineStatistics", "PipelineStage", "PluginSetup"}
"""Types that hold functions or a running engine. Statistics have a test of their own."""


def test_each_exported_type_has_an_example() -> None:
    exported = {
        name
        for module in (staged_pool, staged_pool.client)
        for name in module.__all__
        if dataclasses.is_dataclass(kind := getattr(module, name)) and isinstance(kind, type)
    }
    assert {type(value).__name__ for value in EXAMPLES} == exported - _OF_A_PROCESS


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
def test_each_value_that_users_get_or_give_survives(value: Any, way: str) -> None:
    twin = WAYS[way](value)
    assert type(twin) is type(value)
    assert repr(twin) == repr(value)


@pytest.mark.anyio
async def test_the_statistics_of_an_engine_survive() -> None:
    async with engine_on(LetterModel()) as engine:
        await engine.embed("a")
        found = engine.statistics()
    assert pickle.loads(pickle.dumps(found)) == found
    assert copy.deepcopy(found) == found
