"""Arguments that the Python API takes, and those that it rejects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from numpy.testing import assert_array_equal

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.requests import Chat, EmbedRequest, Image, Output, TextInput, TokenClassifyRequest
from staged_pool.runtime.tasks.plan import plan
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.errors import InvalidInput, ModelFailed
from tests.runtime.images import engine_on as an_engine_on
from tests.support.cards import BOTH_LANES, CARD
from tests.support.model import LetterModel, expected

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def an_engine() -> AsyncIterator[Engine]:
    async with DeviceThreads("test device", watchdog_s=30).running() as device:
        async with run_engine(EngineConfig(), LetterModel(), device=device) as engine:
            yield engine


REFUSED: dict[str, tuple[Callable[[Any], Awaitable[object]], str, int | None]] = {
    "no inputs at all": (lambda e: e.embed(None), "input", None),
    "a number for inputs": (lambda e: e.classify(3), "input", None),
    "a number among texts": (lambda e: e.embed(["a", 2.5]), "input", 1),
    "the ids of one text": (lambda e: e.classify_tokens([1, 2, 3]), "input", 0),
    "a pair that is a list": (lambda e: e.classify(["a", ["b", "c"]]), "input", 1),
    "part of a token": (lambda e: e.embed("a", max_tokens=2.5), "max_tokens", None),
    "tokens in letters": (lambda e: e.classify("a", max_tokens="7"), "max_tokens", None),
    "a yes for tokens": (lambda e: e.score("a", ["b"], max_tokens=True), "max_tokens", None),
    "part of a dimension": (lambda e: e.embed("a", dimensions=4.0), "dimensions", None),
    "part of a weight": (lambda e: e.embed("a", outputs="sparse", max_active_dims=2.5), "max_active_dims", None),
    "labels that are numbers": (lambda e: e.classify("a", candidate_labels=[1]), "candidate_labels", None),
    "labels of bytes": (lambda e: e.classify("a", candidate_labels=b"b"), "candidate_labels", None),
    "a template of bytes": (
        lambda e: e.classify("a", candidate_labels="b", hypothesis_template=b"{}"),
        "hypothesis_template",
        None,
    ),
    "an unknown output": (lambda e: e.embed("a", outputs=["dense", "nope"]), "outputs", None),
    "a number for outputs": (lambda e: e.embed("a", outputs=[3]), "outputs", None),
    "an output that is no vector": (lambda e: e.embed("a", outputs="labels"), "outputs", None),
    "a prompt that is no text": (lambda e: e.embed("a", prompt=3), "prompt", None),
    "a prompt's name that is no text": (lambda e: e.embed("a", prompt_name=["query"]), "prompt_name", None),
    "an image of no bytes": (lambda e: e.embed(["a", Image(Path("a.png"))]), "input", 1),  # type: ignore[arg-type]
    "an image of bytes that may change": (lambda e: e.embed(Image(bytearray(1))), "input", 0),  # type: ignore[arg-type]
    "an image in a pair": (lambda e: e.classify([("a", Image(b"b"))]), "input", 0),
    "an image whose labels are of tokens": (lambda e: e.classify_tokens([Image(b"b")]), "input", 0),
    "an image of no bytes among documents": (
        lambda e: e.score("a", ["b", Image(None)]),  # type: ignore[arg-type]
        "documents",
        1,
    ),
    "no query": (lambda e: e.rerank(None, ["a"]), "queries", None),
    "no documents": (lambda e: e.score("a", None), "documents", None),
    "a number among documents": (lambda e: e.score("a", ["b", 3]), "documents", 1),
    "an instruction that is no text": (lambda e: e.score("a", ["b"], instruction=3), "instruction", None),
    "a negative top_n": (lambda e: e.rerank("a", ["b"], top_n=-1), "top_n", None),
    "part of a document": (lambda e: e.rerank("a", ["b"], top_n=1.5), "top_n", None),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_a_wrong_argument_is_rejected_by_its_name(what: str) -> None:
    ask, param, index = REFUSED[what]
    async with an_engine() as engine:
        with pytest.raises(InvalidInput) as caught:
            await ask(engine)
        assert (caught.value.param, caught.value.index) == (param, index)


async def test_images_and_conversations_may_stand_where_texts_do() -> None:
    chat = Chat(({"role": "user", "content": ("a", Image(b"cat"))},))
    spoken = Chat(({"role": "user", "content": "hi"},))
    async with an_engine_on(LetterModel(BOTH_LANES)) as engine:
        alone = await engine.embed(Image(b"cat"))
        among = await engine.embed(["a", Image(b"dog"), chat, [97], spoken])
        scores = (await engine.score(Image(b"cat"), ["a", Image(b"cat"), chat])).scores
        ranking = (await engine.rerank("a", [Image(b"cat"), "a"])).ranking
    assert_array_equal(alone.embeddings, [expected("cat")])
    wanted = [expected(letters) for letters in ("a", "dog", "cat", "a", "<user>hi")]
    assert_array_equal(among.embeddings, wanted)
    assert scores[1] == pytest.approx(1)
    assert ranking[0].index == 1


async def test_one_output_may_be_given_by_its_name_alone() -> None:
    async with an_engine() as engine:
        assert_array_equal((await engine.embed("ab", outputs="dense")).embeddings, [expected("ab")])


async def test_texts_may_come_from_any_iterable() -> None:
    async with an_engine() as engine:
        found = (await engine.score("ab", (text for text in ("ab", "ba")))).scores  # type: ignore[arg-type]
        assert found.shape == (2,)


def test_an_aggregation_that_is_not_known_is_rejected() -> None:
    card = replace(CARD, outputs=(Output.TOKEN_LABELS,), labels=("O", "B-PER"))
    request = TokenClassifyRequest(inputs=(TextInput("a"),), aggregation="nope")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="none, simple, first, average, max") as caught:
        plan(request, card)
    assert caught.value.param == "aggregation"


def test_dimensions_are_rejected_where_no_dense_vector_is_asked_for() -> None:
    card = replace(CARD, outputs=(Output.DENSE, Output.MULTI_VECTOR))
    for dimensions in (2, card.width):
        request = EmbedRequest(
            inputs=(TextInput("a"),), outputs=frozenset({Output.MULTI_VECTOR}), dimensions=dimensions
        )
        with pytest.raises(InvalidInput) as caught:
            plan(request, card)
        assert caught.value.param == "dimensions"


async def test_a_document_that_is_wrong_is_counted_among_the_documents() -> None:
    async with an_engine() as engine:
        with pytest.raises(InvalidInput) as caught:
            await engine.score("a", ["b", "", "c"])
        assert (caught.value.param, caught.value.index) == ("documents", 1)
        with pytest.raises(InvalidInput) as caught:
            await engine.score(["a", "b", ""], ["c", "d", "e"])
        assert (caught.value.param, caught.value.index) == ("queries", 2)
        with pytest.raises(ModelFailed) as failed:
            await engine.score("a", ["b", "NaN"])
        assert failed.value.index == 1
