"""BART's classifier, such as bart-large-mnli: its decoder reads a text again, and its head the last `</s>`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
import transformers as hf

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.requests import Output, PairInput, TextInput
from staged_pool.stages.errors import ConfigError
from tests.models.heads.test_classifiers import PAIRS, TEXTS, logits, pair_logits, values
from tests.models.oracle import Array
from tests.models.tiny import edit_json
from tests.models.tiny.bodies import POSITIONS, WIDTH, save, widen
from tests.models.tiny.classify import labelled
from tests.models.tiny.vocabularies import byte_bpe

NLI: Final = ("contradiction", "neutral", "entailment")
ENDS: Final = ["a </s> b", "a </s></s> man </s> is", "</s>"]
"""Texts with end tokens of their own: in a batch, transformers takes only equal numbers of them."""
EXACT: Final = 2e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As bart-large-mnli: a pair is `<s> a </s></s> b </s>`, and the decoder begins with `</s>`."""
    path = tmp_path_factory.mktemp("bart") / "model"
    torch.manual_seed(11)
    tokenizer = byte_bpe()
    config = hf.BartConfig(
        vocab_size=len(tokenizer),
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=POSITIONS,
        **labelled(NLI),
    )
    model = hf.BartForSequenceClassification(config)
    widen(model)
    save(path, model, tokenizer, model_max_length=POSITIONS)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Encoder:
    return load_model(EngineConfig(model=str(folder), dtype="float32"))


def expected(folder: Path, inputs: Sequence[tuple[str, ...]]) -> Array:
    """Logits of transformers, one by one."""
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    whole = hf.BartForSequenceClassification.from_pretrained(folder).eval()
    rows = []
    for given in inputs:
        tokens = tokenizer(*[[text] for text in given], truncation=True, max_length=POSITIONS, return_tensors="pt")
        with torch.inference_mode():
            rows.append(whole(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).logits[0])
    return torch.stack(rows).numpy()


def test_labels_of_texts_are_those_of_transformers(folder: Path, model: Encoder) -> None:
    """In one batch with other numbers of end tokens, and alone."""
    texts = [*TEXTS, *ENDS]
    wanted = expected(folder, [(text,) for text in texts])
    assert model.card.labels == NLI
    assert model.card.attention == "padded"
    assert np.abs(logits(model, texts) - wanted).max() < EXACT
    assert np.abs(np.concatenate([logits(model, [text]) for text in texts]) - wanted).max() < EXACT
    assert np.ptp(wanted, axis=0).min() > 0.3


def test_labels_of_pairs_are_those_of_transformers(folder: Path, model: Encoder) -> None:
    pairs = [*PAIRS, ("a </s> b", "short"), ("short", "a </s> </s> b")]
    wanted = expected(folder, pairs)
    assert np.abs(pair_logits(model, pairs) - wanted).max() < EXACT
    mixed = [PairInput(first=a, second=b, max_tokens=-1) for a, b in pairs] + [TextInput(text, -1) for text in TEXTS]
    together = np.stack(values(model, mixed, Output.LABELS))
    assert np.abs(together - np.concatenate([wanted, expected(folder, [(text,) for text in TEXTS])])).max() < EXACT


def test_the_longest_input_is_that_of_its_positions(folder: Path, model: Encoder) -> None:
    assert model.card.max_tokens == POSITIONS
    for words in (POSITIONS - 3, POSITIONS, POSITIONS + 40):
        text = " a" * words
        assert np.abs(logits(model, [text]) - expected(folder, [(text,)])).max() < EXACT


def test_another_classifier_with_a_decoder_is_rejected(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for file in folder.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    edit_json(tmp_path / "model" / "config.json", model_type="mbart", architectures=["MBartForSequenceClassification"])
    with pytest.raises(ConfigError, match="computes labels from a decoder, which is not supported"):
        load_model(EngineConfig(model=str(tmp_path / "model"), dtype="float32"))
