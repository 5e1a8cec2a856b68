"""Every family of embedding models against its oracle: prompts, cut vectors, layouts, and texts of every kind."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.models.transformer.pooling import pool
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import DENSE_ONLY, MODEL_MAX, TextInput
from staged_pool.stages.errors import InvalidInput
from tests.models import oracle, tiny
from tests.models.conftest import LoadTiny, TinyFolder
from tests.models.tiny import PROMPTED, edit_json, write_prompts
from tests.models.vectors.test_oracle import MIXED, PADDED, TEXTS, Vectors, embed

CLOSE = 2e-5
FEW = [*TEXTS[:4], TEXTS[6]]
"""Ordinary, empty, short, of many scripts, and too long."""

PROMPT_NAMES = [
    (kind, name)
    for kind, names in {
        "xlmr-prompt": ("query", "passage"),
        "e5-xlmr": ("query", "passage"),
        "qwen3-embed-left": ("query", "document"),
        "qwen3-embed-right": ("query", "document"),
        "gemma3-embed": ("query", "document", "Clustering"),
        "nomic-matryoshka": ("query", "document", "clustering"),
        "instructor-no-prompt": ("query",),
        "instructor-bpe-no-prompt": ("query",),
        "arctic-cls": ("query", "document"),
        "bge-cls": ("query",),
    }.items()
    for name in names
]
NEVER_PACKED = (*PADDED, "deberta-mean")

ROUGH = {"electra-mean": 0.998, "modernbert-cls": 0.995}
"""Kinds whose random weights amplify rounding, and the least cosine of bfloat16 to float32: transformers' own has
0.9982 with one vocabulary, and less with others, which other versions of Python make."""

Expected = Callable[..., Vectors]


@pytest.fixture(scope="session")
def expected(tiny_folder: TinyFolder) -> Expected:
    """Vectors of the oracle for a kind of tiny model, each computed once."""
    known: dict[tuple[object, ...], Vectors] = {}

    def dense(kind: str, texts: Sequence[str], **settings: Any) -> Vectors:
        given = tuple(sorted(settings.items()))
        missing = [text for text in dict.fromkeys(texts) if (kind, text, given) not in known]
        if missing:
            for text, vector in zip(missing, oracle.dense(tiny_folder(kind), missing, **settings), strict=True):
                known[kind, text, given] = vector
        return np.stack([known[kind, text, given] for text in texts])

    return dense


def apart(one: Vectors, other: Vectors) -> float:
    return float(np.abs(one - other).max())


@pytest.mark.parametrize("kind", PROMPTED)
def test_every_text_has_the_vector_of_the_oracle_in_one_batch_and_in_any_order(
    kind: str, load_tiny: LoadTiny, expected: Expected
) -> None:
    model = load_tiny(kind)
    texts = [*TEXTS, *MIXED]
    random.Random(5).shuffle(texts)
    wanted = expected(kind, texts)
    assert apart(embed(model, texts), wanted) <= CLOSE
    assert apart(embed(model, texts[::-1]), wanted[::-1]) <= CLOSE
    assert np.abs(wanted - wanted.mean(axis=0)).max() > 0.05  # the model does tell texts apart


@pytest.mark.parametrize("kind", PROMPTED)
def test_every_text_has_the_vector_of_the_oracle_alone(kind: str, load_tiny: LoadTiny, expected: Expected) -> None:
    model = load_tiny(kind)
    alone = np.concatenate([embed(model, [text]) for text in TEXTS])
    assert apart(alone, expected(kind, TEXTS)) <= CLOSE


@pytest.mark.parametrize("kind", PROMPTED)
def test_every_text_has_the_vector_of_the_oracle_in_a_padded_batch(
    kind: str, load_tiny: LoadTiny, expected: Expected
) -> None:
    model = load_tiny(kind, attention="padded")
    texts = [*TEXTS, *MIXED]
    assert model.pads("text")
    assert apart(embed(model, texts), expected(kind, texts)) <= CLOSE


@pytest.mark.parametrize("kind", PROMPTED)
def test_a_family_is_packed_unless_its_attention_cannot_be_replaced(kind: str, load_tiny: LoadTiny) -> None:
    assert load_tiny(kind).pads("text") == (kind in NEVER_PACKED)


@pytest.mark.parametrize(("kind", "name"), PROMPT_NAMES)
def test_a_prompt_by_its_name_goes_before_each_text(
    kind: str, name: str, load_tiny: LoadTiny, expected: Expected
) -> None:
    wanted = expected(kind, FEW, prompt_name=name)
    for attention in ("auto", "padded"):
        assert apart(embed(load_tiny(kind, attention=attention), FEW, prompt_name=name), wanted) <= CLOSE


def test_the_prompts_that_are_tested_are_all_that_the_folders_have(load_tiny: LoadTiny) -> None:
    kinds = [*PROMPTED, "xlmr-prompt"]
    assert sorted((kind, name) for kind in kinds for name in load_tiny(kind).card.prompts) == sorted(PROMPT_NAMES)


@pytest.mark.parametrize("kind", [*PROMPTED, "xlmr-prompt", "roberta-mean", "t5-mean", "bert-cls", "qwen3-last"])
def test_any_prompt_goes_before_each_text(kind: str, load_tiny: LoadTiny, expected: Expected) -> None:
    model = load_tiny(kind)
    prompt = "A prompt of the caller's own: "
    vectors = embed(model, FEW, prompt=prompt)
    assert apart(vectors, expected(kind, FEW, prompt=prompt)) <= CLOSE
    assert apart(vectors, expected(kind, FEW)) > 1e-3


def test_the_default_prompt_goes_before_each_text_unless_another_is_asked_for(
    load_tiny: LoadTiny, expected: Expected
) -> None:
    model = load_tiny("xlmr-prompt")
    assert model.card.default_prompt == "query: "
    assert apart(embed(model, FEW), expected("xlmr-prompt", FEW, prompt_name="query")) <= CLOSE
    assert apart(embed(model, FEW, prompt=""), expected("xlmr-prompt", FEW, prompt="")) <= CLOSE
    assert apart(embed(model, FEW), embed(model, FEW, prompt="")) > 1e-3


@pytest.mark.parametrize(
    ("kind", "widths"), [("nomic-matryoshka", (8, 16, 24, 32)), ("jina-matryoshka", (1, 7, 31)), ("xlmr-prompt", (5,))]
)
def test_vectors_that_are_cut_are_normalised_again(
    kind: str, widths: tuple[int, ...], load_tiny: LoadTiny, expected: Expected
) -> None:
    for width in widths:
        vectors = embed(load_tiny(kind), FEW, dimensions=width)
        assert vectors.shape == (len(FEW), width)
        assert apart(vectors, expected(kind, FEW, dimensions=width)) <= CLOSE


def test_widths_that_a_model_was_not_trained_for_are_rejected(load_tiny: LoadTiny) -> None:
    with pytest.raises(
        InvalidInput, match=r"'nomic-matryoshka' only supports Matryoshka dimensions \[8, 16, 24, 32\], got 20"
    ):
        embed(load_tiny("nomic-matryoshka"), FEW, dimensions=20)
    with pytest.raises(InvalidInput, match="does not support Matryoshka embeddings; dimensions must be unset or 32"):
        embed(load_tiny("bge-cls"), FEW, dimensions=16)


@pytest.mark.parametrize("kind", [*PROMPTED, "roberta-mean", "bert-cls", "distilbert-mean", "modernbert-cls"])
def test_bfloat16_stays_close_to_float32(kind: str, load_tiny: LoadTiny, expected: Expected) -> None:
    texts = [*FEW, *MIXED[:16]]
    vectors, wanted = embed(load_tiny(kind, dtype="bfloat16"), texts), expected(kind, texts)
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(wanted, axis=1)
    assert ((vectors * wanted).sum(axis=1) / lengths).min() >= ROUGH.get(kind, 0.999)


def test_a_decoder_that_reads_both_ways_is_understood(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("qwen3-last"), tmp_path / "model")
    edit_json(folder / "config.json", is_causal=False)
    wanted = oracle.dense(folder, FEW)
    assert apart(wanted, oracle.dense(tiny_folder("qwen3-last"), FEW)) > 0.05
    for attention in ("packed", "padded"):
        model = load_model(EngineConfig(model=str(folder), dtype="float32", attention=attention))
        assert apart(embed(model, FEW), wanted) <= CLOSE


def test_an_empty_text_without_special_tokens_is_rejected(tmp_path: Path) -> None:
    folder = tiny.build("qwen3-embed-right", tmp_path / "model")
    edit_json(folder / "tokenizer.json", post_processor=None)
    model = load_model(EngineConfig(model=str(folder)))
    (rejected,) = model.preprocess([ModelInput(TextInput("", MODEL_MAX), DENSE_ONLY)])
    assert isinstance(rejected, InvalidInput)
    assert "no tokens" in str(rejected)


@pytest.mark.parametrize("kind", ["bert-mean", "roberta-mean"])
@pytest.mark.parametrize("mode", ["cls", "max", "weightedmean", "mean_sqrt_len_tokens", "lasttoken"])
def test_every_pooling_leaves_a_prompt_out_as_the_oracle_does(
    kind: str, mode: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder(kind), tmp_path / "model")
    pooling = {"embedding_dimension": tiny.WIDTH, "pooling_mode": mode, "include_prompt": False}
    tiny.write_json(folder / "1_Pooling" / "config.json", pooling)
    write_prompts(folder, {"query": "Represent the question: "})
    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    wanted = oracle.dense(folder, FEW, prompt_name="query")
    assert apart(embed(model, FEW, prompt_name="query"), wanted) <= CLOSE
    assert apart(embed(model, FEW), oracle.dense(folder, FEW)) <= CLOSE


def test_a_sequence_of_nothing_but_a_prompt_is_pooled_whole() -> None:
    hidden = torch.arange(12.0).reshape(6, 2)
    sequences = [TokenSequence([5] * length, DENSE_ONLY, prompt_tokens=prompt) for length, prompt in ((2, 2), (4, 3))]
    batch = PackedBatch.of(sequences, torch.device("cpu"))
    assert pool(hidden, batch.lengths, ["mean"], skip=batch.prompts).tolist() == [[1, 2], [10, 11]]
    assert pool(hidden, batch.lengths, ["cls"], skip=batch.prompts).tolist() == [[0, 1], [10, 11]]
