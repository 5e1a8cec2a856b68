"""Vectors against sentence-transformers, on the same folders."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import Model
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.folders.resolver import resolve
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.requests import MODEL_MAX, EmbedRequest, TextInput
from staged_pool.runtime.results import EmbedResult
from staged_pool.runtime.tasks.embed import plan
from staged_pool.stages.errors import ModelFailed
from staged_pool.stages.work import Prepared
from tests.models.conftest import LoadTiny, TinyFolder
from tests.models.tiny import KINDS

Vectors = NDArray[np.float32]
Oracle = Callable[[Path, Sequence[str]], Vectors]

WORDS = " ".join(topics.values()).split()
TEXTS = [
    "A man is eating food.",
    "",
    "short",
    "naïve café, Ωmega, 日本語のテキスト, 🙂🏽, e\u0301, \u200b, İ",
    "   leading, trailing and   inner blanks \n\t ",
    "[CLS] <s> </s> [MASK]",
    " ".join(WORDS[:600]),
    "a" * 400,
]
MIXED = [" ".join(WORDS[n * 97 : n * 97 + 1 + n * n % 43]) for n in range(64)]
CLOSE = 1e-5
PADDED = ("mpnet-mean", "t5-mean")
PACKED = [kind for kind in KINDS if kind not in PADDED]


def embed(model: Model, texts: Sequence[str], **settings: Any) -> Vectors:
    """Vectors as a client gets them: cut to the longest input, and normalised where the model does that."""
    inputs = tuple(TextInput(text, max_tokens=MODEL_MAX) for text in texts)
    planned = plan(EmbedRequest(inputs=inputs, **settings), model.card)
    payloads = [p.payload for p in model.preprocess(planned.inputs) if isinstance(p, Prepared)]
    rows = [row for row in model.forward(payloads) if not isinstance(row, ModelFailed)]
    assert len(rows) == len(texts)
    result = planned.finish(rows, 0)
    assert isinstance(result, EmbedResult)
    return result.embeddings


def normalised(vectors: Vectors) -> Vectors:
    lengths: Vectors = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / lengths


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """Vectors of sentence-transformers for a folder."""
    loaded: dict[Path, Any] = {}

    def encode(folder: Path, texts: Sequence[str]) -> Vectors:
        with warnings.catch_warnings(action="ignore"):
            if folder not in loaded:
                from sentence_transformers import SentenceTransformer

                loaded[folder] = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
            vectors: Vectors = loaded[folder].encode(list(texts), show_progress_bar=False)
        return vectors

    return encode


@pytest.fixture(scope="session")
def minilm() -> Encoder:
    """The real weights of all-MiniLM-L6-v2, in float32."""
    return load_model(EngineConfig(dtype="float32"))


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_sentence_transformers(
    kind: str, load_tiny: LoadTiny, tiny_folder: TinyFolder, oracle: Oracle
) -> None:
    model = load_tiny(kind)
    texts = [*TEXTS, *MIXED]
    wanted = oracle(tiny_folder(kind), texts)
    if model.card.normalize:
        wanted = normalised(wanted)  # of vectors that are cut too, which the oracle leaves shorter than 1
    assert np.abs(embed(model, texts) - wanted).max() <= CLOSE


@pytest.mark.parametrize("kind", PACKED)
def test_packed_and_padded_batches_give_the_same_vectors(kind: str, load_tiny: LoadTiny) -> None:
    packed, padded = load_tiny(kind), load_tiny(kind, attention="padded")
    assert not packed.pads("text")
    assert packed.card.attention == "packed"
    assert padded.pads("text")
    assert padded.card.attention == "padded"
    assert np.abs(embed(packed, TEXTS) - embed(padded, TEXTS)).max() <= CLOSE


@pytest.mark.parametrize("kind", PADDED)
def test_an_architecture_that_cannot_be_packed_is_padded(kind: str, load_tiny: LoadTiny) -> None:
    assert load_tiny(kind).pads("text")


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_alone_and_among_others_gives_the_same_vector(kind: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(kind)
    together = embed(model, MIXED)
    alone = np.concatenate([embed(model, [text]) for text in MIXED[:16]])
    order = list(range(64))
    random.Random(3).shuffle(order)
    shuffled = embed(model, [MIXED[place] for place in order])
    assert np.abs(together[:16] - alone).max() <= CLOSE
    assert np.abs(together[order] - shuffled).max() <= CLOSE
    assert np.abs(together - together.mean(axis=0)).max() > 0.05  # the model does tell texts apart


def test_a_prefix_of_the_dimensions_is_normalised_again(load_tiny: LoadTiny) -> None:
    model = load_tiny("xlmr-prompt")  # which says that it was trained for it
    whole = embed(model, TEXTS[:1], normalize=False)
    assert np.allclose(embed(model, TEXTS[:1], dimensions=8), normalised(whole[:, :8]), atol=CLOSE)


def test_the_real_model_gives_the_vectors_of_sentence_transformers(minilm: Encoder, oracle: Oracle) -> None:
    texts = [*TEXTS, *MIXED]
    assert np.abs(embed(minilm, texts) - oracle(resolve(None).folder, texts)).max() <= CLOSE


def test_the_real_model_in_bfloat16_stays_close_to_float32(oracle: Oracle) -> None:
    model = load_model(EngineConfig(dtype="bfloat16", torch_threads=1))  # which no plan of threads is tried for
    texts = [text for text in TEXTS + MIXED[:8] if text]  # without bfloat16 in the processor each takes seconds
    cosines = (embed(model, texts) * oracle(resolve(None).folder, texts)).sum(axis=1)
    assert cosines.min() >= 0.9998


def test_the_real_model_finds_related_sentences(minilm: Encoder) -> None:
    vectors = embed(minilm, ["A man is eating food.", "Someone has a meal.", "The stock market fell sharply today."])
    related, unrelated = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert related > 0.6
    assert unrelated < 0.2


def test_the_card_says_what_was_understood(minilm: Encoder) -> None:
    card = minilm.card
    assert (card.name, card.architecture) == ("sentence-transformers/all-MiniLM-L6-v2", "BertModel")
    assert (card.width, card.max_tokens, card.vocabulary) == (384, 256, 30522)
    assert (card.pooling, card.normalize, card.attention) == ("mean", True, "packed")
    assert (card.dtype, card.parameters) == ("float32", 22_565_376)
    assert card.load_s > 0
