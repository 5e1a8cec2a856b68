"""Sparse models without inference for queries: a Router looks up the weights of a query's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.encoding.vectors import encoding
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.payloads import SparseVector
from staged_pool.runtime.requests import MODEL_MAX, EmbedRequest, Output, ScoreRequest, TextInput
from staged_pool.stages.errors import ConfigError, InvalidArgument, InvalidInput
from tests.models import oracle
from tests.models.heads.test_sparse import TEXTS, as_dict, assert_same, weights
from tests.models.requests import embed, score, sequences
from tests.models.tiny import EVERY, edit_json, word_piece, write_json
from tests.models.tiny.vocabularies import SIZE

QUERIES: Final = [text for text in TEXTS if text]
MODULES: Final = "sentence_transformers.sparse_encoder.models"
STATIC: Final = "query_0_SparseStaticEmbedding"


def opensearch(folder: Path) -> None:
    """As opensearch-neural-sparse-encoding-doc-v3-distill: the model for documents lies at the top."""
    EVERY["splade-distilbert"](folder)
    write_json(
        folder / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"}]
    )
    pooling = {"pooling_strategy": "max", "activation_function": "log1p_relu", "word_embedding_dimension": None}
    write_json(folder / "document_1_SpladePooling" / "config.json", pooling)
    write_json(folder / STATIC / "config.json", {"frozen": False})
    word_piece().save_pretrained(folder / STATIC)
    table = torch.rand(SIZE) * 8
    table[::7] = 0
    save_file({"weight": table}, folder / STATIC / "model.safetensors")
    write_json(
        folder / "router_config.json",
        {
            "types": {
                STATIC: f"{MODULES}.SparseStaticEmbedding",
                "": f"{MODULES}.MLMTransformer",
                "document_1_SpladePooling": f"{MODULES}.SpladePooling",
            },
            "structure": {"query": [STATIC], "document": ["", "document_1_SpladePooling"]},
            "parameters": {"default_route": "document", "allow_empty_key": True},
        },
    )
    settings = {"model_type": "SparseEncoder", "prompts": {"query": "", "document": ""}, "similarity_fn_name": "dot"}
    write_json(folder / "config_sentence_transformers.json", settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("router") / "model"
    path.mkdir()
    torch.manual_seed(3)
    opensearch(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Encoder:
    return load_model(EngineConfig(model=str(folder), dtype="float32"))


def expected(folder: Path, texts: Sequence[str], role: str, **others: Any) -> list[dict[int, float]]:
    encoder = oracle.loaded("SparseEncoder", folder)
    encode = {"query": encoder.encode_query, "document": encoder.encode_document, "none": encoder.encode}[role]
    rows = [encode([text], convert_to_sparse_tensor=False, show_progress_bar=False, **others)[0] for text in texts]
    return [{int(i): float(row[i]) for i in row.nonzero()[:, 0]} for row in rows]


def test_queries_are_looked_up_and_documents_computed(folder: Path, model: Encoder) -> None:
    assert_same(weights(model, QUERIES, prompt_name="query"), expected(folder, QUERIES, "query"))
    documents = expected(folder, TEXTS, "document")
    assert_same(weights(model, TEXTS, prompt_name="document"), documents)
    assert_same(weights(model, TEXTS), documents)
    assert_same(weights(model, TEXTS), expected(folder, TEXTS, "none"))


def test_queries_run_in_a_batch_with_documents(folder: Path, model: Encoder) -> None:
    request = ScoreRequest(queries=tuple(QUERIES), documents=tuple(QUERIES), max_tokens=MODEL_MAX)
    found = np.concatenate(
        [score(model, query, [document]).scores for query, document in zip(QUERIES, QUERIES, strict=True)]
    )
    queries, documents = (expected(folder, QUERIES, role) for role in ("query", "document"))
    wanted = [sum(q[i] * d.get(i, 0.0) for i in q) for q, d in zip(queries, documents, strict=True)]
    assert np.abs(found - wanted).max() <= 1e-4
    looked_up = [sequence.looked_up for sequence in sequences(model, request)]
    assert looked_up == [True] * len(QUERIES) + [False] * len(QUERIES)


def test_a_query_has_no_special_tokens_and_runs_no_transformer(model: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    request = EmbedRequest(inputs=(TextInput("short"),), outputs=frozenset({Output.SPARSE}), prompt_name="query")
    (sequence,) = sequences(model, request)
    (document,) = sequences(model, EmbedRequest(inputs=(TextInput("short"),), outputs=frozenset({Output.SPARSE})))
    assert document.ids[1:-1] == sequence.ids
    monkeypatch.setattr("staged_pool.runtime.models.transformer.packed_transformer.PackedTransformer.hidden", None)
    assert weights(model, ["short"], prompt_name="query")[0].size


def test_encode_query_and_encode_document_go_their_ways(folder: Path, model: Encoder) -> None:
    for role in ("query", "document"):
        call = encoding(model.card, QUERIES, (), {}, role)
        given = {name: value for name, value in call.embed.items() if name in ("prompt", "prompt_name")}
        assert_same(weights(model, QUERIES, **given), expected(folder, QUERIES, role))


def test_the_largest_weights_are_kept_as_the_folder_says(folder: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    cut.mkdir()
    torch.manual_seed(3)
    opensearch(cut)
    edit_json(cut / "config_sentence_transformers.json", max_active_dims=3)
    model = load_model(EngineConfig(model=str(cut), dtype="float32"))
    for role in ("query", "document"):
        found = weights(model, QUERIES, prompt_name=role)
        assert max(len(vector.indices) for vector in found) == 3
        assert_same(found, expected(cut, QUERIES, role))
        assert_same(found, expected(folder, QUERIES, role, max_active_dims=3))
        fewer = weights(model, QUERIES, prompt_name=role, max_active_dims=2)
        assert_same(fewer, expected(folder, QUERIES, role, max_active_dims=2))
        with pytest.raises(InvalidInput, match="`cut` keeps 3 weights: max_active_dims may be as many"):
            weights(model, QUERIES, prompt_name=role, max_active_dims=4)
    call = encoding(model.card, QUERIES, (), {"max_active_dims": 4})
    with pytest.raises(InvalidArgument, match="max_active_dims: the folder of `cut` keeps 3 weights"):
        call.finish([embed(model, QUERIES, Output.SPARSE)])


def router(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "router_config.json", **changes)


def table(count: int) -> Callable[[Path], None]:
    return lambda folder: save_file({"weight": torch.ones(count)}, folder / STATIC / "model.safetensors")


def other_tokens(folder: Path) -> None:
    file = folder / STATIC / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = {f"{word}x": i for word, i in content["model"]["vocab"].items()} | {"[UNK]": 1}
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (router(structure={"query": [STATIC]}), r"the routes \['query'\] are not supported"),
        (router(structure={"query": [""], "document": [""]}), "the query route must be one SparseStaticEmbedding"),
        (router(parameters={"default_route": "query"}), "default_route must be document"),
        (router(parameters={"route_mappings": {"('query', 'text')": "query"}}), "the routes"),
        (router(types={}), "type is missing"),
        (lambda folder: (folder / "router_config.json").unlink(), "types|routes"),
        (
            lambda folder: (folder / STATIC / "model.safetensors").unlink(),
            "no model.safetensors and no pytorch_model.bin",
        ),
        (table(9), f"has 9 weights for {SIZE} tokens"),
        (other_tokens, "queries and documents have different tokens"),
    ],
)
def test_a_router_that_is_not_understood_is_rejected(
    spoil: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    opensearch(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_model(EngineConfig(model=str(tmp_path), dtype="float32"))


def test_ids_of_a_query_are_looked_up_once_each(folder: Path, model: Encoder) -> None:
    (found,) = embed(model, ["short short short"], Output.SPARSE, prompt_name="query").sparse or ()
    assert isinstance(found, SparseVector)
    assert as_dict(found) == pytest.approx(expected(folder, ["short"], "query")[0])
