"""Texts that are longer than the model takes: the mean of their parts, where the engine is set up for it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from tokenizers import Tokenizer

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import open_engine
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.requests import MODEL_MAX
from staged_pool.stages.errors import InvalidInput
from tests.models import oracle
from tests.models.conftest import TinyFolder
from tests.models.vectors.test_oracle import Vectors, normalised

pytestmark = pytest.mark.anyio

ROOM = 62
"""Tokens of a text's own in `bert-mean`, beside the two special ones."""

CLOSE = 2e-5
LONG = " ".join(" ".join(topics.values()).split()[:2000])
SHORT = ["A man is eating food.", "short", ""]


def settings(folder: Path, *, split: bool = True) -> EngineConfig:
    return EngineConfig(model=str(folder), dtype="float32", split_long_inputs=split)


@pytest.fixture(scope="module")
def bert(tiny_folder: TinyFolder) -> Path:
    return tiny_folder("bert-mean")


@pytest.fixture(scope="module")
def e5(tiny_folder: TinyFolder) -> Path:
    return tiny_folder("e5-xlmr")


@pytest.fixture(scope="module")
def nomic(tiny_folder: TinyFolder) -> Path:
    return tiny_folder("nomic-matryoshka")


@pytest.fixture(scope="module")
def parts(bert: Path) -> list[list[int]]:
    """Return the parts of `LONG`: each as long as the model takes, but for the last one."""
    ids = tokens_of(bert, LONG)
    return [[2, *ids[start : start + ROOM], 3] for start in range(0, len(ids), ROOM)]


@pytest.fixture(scope="module")
def references(bert: Path) -> Vectors:
    """Return the vectors of the short texts, and of the long one cut."""
    return oracle.dense(bert, [*SHORT, LONG])


@pytest.fixture
async def splitting(bert: Path) -> AsyncIterator[Engine]:
    async with open_engine(settings(bert)) as engine:
        assert engine.card.max_tokens == ROOM + 2
        yield engine


def tokens_of(folder: Path, text: str) -> list[int]:
    """Without special tokens, and uncut."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def weights_of(parts: list[list[int]]) -> Vectors:
    return np.array([len(part) for part in parts], np.float32)


async def test_a_long_text_is_the_mean_of_its_parts_weighted_by_their_tokens(
    splitting: Engine, parts: list[list[int]]
) -> None:
    assert len(parts) > 20
    assert len(parts[-1]) < len(parts[0])
    alone = await splitting.embed(parts)
    weights = weights_of(parts)
    by_hand: Vectors = weights @ alone.embeddings / weights.sum()

    whole = await splitting.embed(LONG)
    assert np.abs(whole.embeddings[0] - by_hand / np.linalg.norm(by_hand)).max() <= CLOSE
    assert np.isclose(np.linalg.norm(whole.embeddings[0]), 1)
    assert whole.usage.prompt_tokens == weights.sum() == alone.usage.prompt_tokens


async def test_short_texts_beside_a_long_one_are_unchanged(splitting: Engine, references: Vectors) -> None:
    mixed = await splitting.embed([SHORT[0], LONG, *SHORT[1:]])
    assert np.abs(mixed.embeddings[[0, 2, 3]] - references[:3]).max() <= CLOSE
    alone = await splitting.embed(LONG)
    assert np.abs(mixed.embeddings[1] - alone.embeddings[0]).max() <= CLOSE


@pytest.fixture(scope="module")
def prompted(e5: Path) -> tuple[int, int]:
    """Count the tokens of prompt and long text, and those of the prompt."""
    prompt, whole = tokens_of(e5, "query: "), tokens_of(e5, "query: " + LONG)
    shared = next(place for place, (a, b) in enumerate(zip(whole, [*prompt, -1], strict=False)) if a != b)
    return len(whole), shared


async def test_every_part_has_the_prompt(e5: Path, prompted: tuple[int, int]) -> None:
    async with open_engine(settings(e5)) as engine:
        long, plain = await engine.embed(LONG, prompt_name="query"), await engine.embed(LONG)
    tokens, shared = prompted
    count = math.ceil((tokens - shared) / (engine.card.max_tokens - 2 - shared))
    assert shared > 0
    assert long.usage.prompt_tokens == tokens + (count - 1) * shared + 2 * count
    assert np.abs(long.embeddings - plain.embeddings).max() > 1e-3
    assert np.isclose(np.linalg.norm(long.embeddings[0]), 1)


async def test_vectors_that_are_not_normalised_are_averaged_as_they_are(
    splitting: Engine, parts: list[list[int]]
) -> None:
    alone = await splitting.embed(parts, normalize=False)
    weights = weights_of(parts)
    whole = await splitting.embed(LONG, normalize=False)
    assert np.abs(whole.embeddings[0] - weights @ alone.embeddings / weights.sum()).max() <= CLOSE


async def test_a_mean_of_parts_is_cut_and_normalised_again(nomic: Path) -> None:
    async with open_engine(settings(nomic)) as engine:
        whole, shorter = await engine.embed(LONG), await engine.embed(LONG, dimensions=8)
    assert np.abs(shorter.embeddings - normalised(whole.embeddings[:, :8])).max() <= CLOSE


async def test_a_request_that_cuts_is_not_split(splitting: Engine, references: Vectors) -> None:
    result = await splitting.embed(LONG, max_tokens=MODEL_MAX)
    assert result.usage.prompt_tokens == splitting.card.max_tokens
    assert np.abs(result.embeddings - references[3]).max() <= CLOSE


async def test_a_long_text_is_rejected_unless_it_may_be_split(bert: Path) -> None:
    async with open_engine(settings(bert, split=False)) as engine:
        with pytest.raises(InvalidInput, match="maximum context length is 64 tokens"):
            await engine.embed(LONG)


@pytest.mark.parametrize(("kind", "splits"), [("bert-mean", True), ("ce-bert-1label", False)])
def test_only_models_that_give_dense_vectors_split(kind: str, splits: bool, tiny_folder: TinyFolder) -> None:
    assert load_model(settings(tiny_folder(kind))).card.splits_long_inputs is splits
    assert not load_model(settings(tiny_folder(kind), split=False)).card.splits_long_inputs
