"""Models of real sizes with random weights: sizes, tokenizers, and vectors that tell texts apart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from perf.gpu.models import POSITIONS, ROWS, bert_folder
from perf.tools.texts import TextSource
from staged_pool import Pool


def _folder(folder: Path, tokenizer: Path | None = None) -> Path:
    return bert_folder(
        folder, layers=2, width=64, heads=4, inner=128, device="cpu", dtype="float32", tokenizer=tokenizer
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _folder(tmp_path_factory.mktemp("models") / "bert")


def test_a_folder_has_weights_of_real_sizes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    sizes = config["vocab_size"], config["hidden_size"], config["num_hidden_layers"], config["max_position_embeddings"]
    assert sizes == (ROWS, 64, 2, POSITIONS)


def test_texts_of_known_lengths_are_made_with_its_tokenizer(folder: Path) -> None:
    source = TextSource(str(folder))
    texts = [text for request in source.lists("x64")[:4] for text in request]
    assert len({word for text in texts for word in text.split()}) > 1000
    assert {source.tokens_of(text) for request in source.lists("m8") for text in request} == {64}


def test_vectors_are_those_of_sentence_transformers_and_tell_texts_apart(folder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    texts = TextSource(str(folder)).lists("x64")[0][:8]
    with Pool(str(folder), device="cpu", dtype="float32", offline=True) as pool:
        ours = pool.embed(texts).embeddings
    theirs = SentenceTransformer(str(folder), device="cpu").encode(texts)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    others = ours @ ours.T - np.eye(len(texts))
    assert others.max() < 0.97


def test_a_tokenizer_is_copied_from_another_folder(folder: Path, tmp_path: Path) -> None:
    copy = _folder(tmp_path / "copy", folder)
    assert (copy / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none has no tokenizer\.json"):
        _folder(tmp_path / "bert", tmp_path / "none")
