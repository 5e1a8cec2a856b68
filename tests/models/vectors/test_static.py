"""Static token vectors, against StaticEmbedding of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import DENSE_ONLY, TextInput
from staged_pool.stages.errors import ConfigError, InvalidInput
from staged_pool.stages.work import Prepared
from tests.models import oracle
from tests.models.tiny import WIDTH, edit_json, word_piece, write_json
from tests.models.tiny.vocabularies import SIZE
from tests.models.vectors.test_oracle import MIXED, TEXTS, Vectors, embed

LONG: Final = "A man is eating food in the old town. " * 300
"""Longer than the usual limit of a transformer, which nothing cuts."""
ALL: Final = (*TEXTS, *MIXED, LONG)
STATIC: Final = "sentence_transformers.sentence_transformer.modules.static_embedding.StaticEmbedding"
NORMALIZE: Final = "sentence_transformers.base.modules.normalize.Normalize"


def write(folder: Path, tensors: Mapping[str, Tensor], modules: list[tuple[str, str]], body: str = "") -> Path:
    """Write a folder of static vectors: its table, its tokenizer and `modules.json`."""
    (folder / body).mkdir(parents=True)
    save_file(dict(tensors), folder / body / "model.safetensors")
    tokenizer = word_piece().backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.save(str(folder / body / "tokenizer.json"))
    entries = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(modules)]
    write_json(folder / "modules.json", entries)
    return folder


def static_retrieval(folder: Path) -> None:
    """As static-retrieval-mrl-en-v1: a folder of its own for the table, prompts, no normalization."""
    write(folder, {"embedding.weight": torch.randn(SIZE, WIDTH)}, [(STATIC, "0_StaticEmbedding")], "0_StaticEmbedding")
    settings = {"model_type": "SentenceTransformer", "prompts": {"query": "search: "}, "default_prompt_name": "query"}
    write_json(folder / "config_sentence_transformers.json", settings)


def potion(folder: Path, **others: Tensor) -> None:
    """As potion-base-8M of model2vec: everything at the top, normalised."""
    write(folder, {"embeddings": torch.randn(SIZE, WIDTH), **others}, [(STATIC, "."), (NORMALIZE, "1_Normalize")])
    write_json(folder / "config.json", {"model_type": "model2vec", "architectures": ["StaticModel"], "normalize": True})


def quantised(folder: Path) -> None:
    """As model2vec saves a table with fewer rows than tokens."""
    write(
        folder,
        {
            "embeddings": torch.randn(40, WIDTH).half(),
            "mapping": torch.randint(0, 40, (SIZE,)),
            "weights": torch.rand(SIZE, dtype=torch.float64),
        },
        [(STATIC, "."), (NORMALIZE, "1_Normalize")],
    )


def projected(folder: Path) -> None:
    static_retrieval(folder)
    dense = folder / "1_Dense"
    settings = {
        "in_features": WIDTH,
        "out_features": 20,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    write_json(dense / "config.json", settings)
    weights = {"linear.weight": torch.randn(20, WIDTH) / 6, "linear.bias": torch.randn(20)}
    save_file(weights, dense / "model.safetensors")
    kind = "sentence_transformers.base.modules.dense.Dense"
    chain = [(STATIC, "0_StaticEmbedding"), (kind, "1_Dense")]
    entries = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(chain)]
    write_json(folder / "modules.json", entries)


def cut(folder: Path) -> None:
    """The tokenizer's file was saved with its truncation, which sentence-transformers then applies."""
    potion(folder)
    edit_json(folder / "tokenizer.json", truncation=TRUNCATION)


TRUNCATION: Final = {"direction": "Right", "max_length": 12, "strategy": "LongestFirst", "stride": 0}

KINDS: Final[Mapping[str, Callable[[Path], None]]] = {
    "static-retrieval": static_retrieval,
    "potion": potion,
    "quantised": quantised,
    "projected": projected,
    "cut": cut,
}


def vectors(folder: Path, texts: Sequence[str]) -> Vectors:
    """Vectors of sentence-transformers, one by one."""
    model = oracle.loaded("SentenceTransformer", folder)
    found: Vectors = np.concatenate([model.encode([text], show_progress_bar=False) for text in texts])
    return found


def load(folder: Path, **settings: Any) -> Encoder:
    return load_model(EngineConfig(model=str(folder), **settings))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("static")

    def folder(kind: str) -> Path:
        if not (root / kind).exists():
            torch.manual_seed(3)
            KINDS[kind](root / kind)
        return root / kind

    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_texts_have_the_vectors_of_sentence_transformers(kind: str, folder_of: Callable[[str], Path]) -> None:
    """Packed and padded, together and alone; no text is cut."""
    folder = folder_of(kind)
    wanted = vectors(folder, ALL)
    packed, padded = load(folder), load(folder, attention="padded")
    assert (packed.card.attention, padded.card.attention) == ("packed", "padded")
    assert packed.card.dtype == "float32"
    assert np.abs(embed(packed, ALL) - wanted).max() <= 2e-6
    assert np.abs(embed(padded, ALL) - wanted).max() <= 2e-6
    assert np.abs(np.concatenate([embed(packed, [text]) for text in ALL[:8]]) - wanted[:8]).max() <= 2e-6
    assert packed.card.outputs == tuple(DENSE_ONLY)


def test_a_text_without_tokens_has_a_vector_of_zeros(folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of("potion"))
    found = embed(model, ["", "short", "  "])
    assert not found[[0, 2]].any()
    assert found[1].any()
    with pytest.raises(InvalidInput, match="no tokens"):
        raise refusal(model, ())


def refusal(model: Encoder, ids: tuple[int, ...]) -> InvalidInput:
    (found,) = model.preprocess([ModelInput(TextInput(ids), DENSE_ONLY)])
    assert isinstance(found, InvalidInput)
    return found


def test_ids_are_taken_up_to_the_last_token_of_the_vocabulary(folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of("potion"))
    assert model.card.vocabulary == SIZE
    assert f"Token id {SIZE} is out of vocabulary" in str(refusal(model, (5, SIZE)))
    (found,) = model.preprocess([ModelInput(TextInput((5, SIZE - 1)), DENSE_ONLY)])
    assert isinstance(found, Prepared)
    assert isinstance(found.payload, TokenSequence)
    assert [*found.payload.ids] == [5, SIZE - 1]


def test_model2vec_without_modules_normalises_as_its_config_says(tmp_path: Path) -> None:
    torch.manual_seed(3)
    potion(tmp_path / "normalised")
    wanted = vectors(tmp_path / "normalised", ALL)
    (tmp_path / "normalised" / "modules.json").unlink()
    assert np.abs(embed(load(tmp_path / "normalised"), ALL) - wanted).max() <= 2e-6
    edit_json(tmp_path / "normalised" / "config.json", normalize=False)
    raw = embed(load(tmp_path / "normalised"), ALL)
    lengths = np.linalg.norm(raw, axis=1, keepdims=True)
    assert np.abs(np.divide(raw, lengths, where=lengths > 0, out=raw * 0) - wanted).max() <= 2e-6
    assert lengths.max() > 2


def tensors(**changes: Tensor | None) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors") | changes
        save_file({name: each for name, each in stored.items() if each is not None}, folder / "model.safetensors")

    return edit


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (tensors(embeddings=None, mapping=None, weights=None, other=torch.zeros(2)), "no embedding.weight or embedd"),
        (tensors(other=torch.zeros(2)), "other of the weights is not known beside embeddings"),
        (tensors(embeddings=torch.zeros(4, 4, dtype=torch.int8)), "must be a table of floating point numbers, not 2 x"),
        (tensors(mapping=torch.full((SIZE,), 40)), "mapping must give each token one of the 40 rows"),
        (tensors(weights=torch.ones(3)), f"weights has 3 numbers for {SIZE} tokens"),
        (tensors(mapping=None, weights=None), f"has {SIZE} tokens, but the weights have only 40"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 20), "the weights are damaged"),
    ],
)
def test_a_folder_that_is_not_understood_is_rejected(
    spoil: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    quantised(tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "model")
