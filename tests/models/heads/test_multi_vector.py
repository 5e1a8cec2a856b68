"""A vector for each token: the same as the oracle's, in every layout of folders that there is."""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import ModernBertModel

from staged_pool.runtime.config import Attention, EngineConfig
from staged_pool.runtime.engine.open import open_engine
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.folders import resolver
from staged_pool.runtime.models.folders.folder import read_folder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.payloads import Row
from staged_pool.runtime.requests import MODEL_MAX, EmbedRequest, Output, TextInput
from staged_pool.stages.errors import ConfigError, InvalidInput
from tests.models import oracle
from tests.models.conftest import LoadTiny, TinyFolder
from tests.models.oracle import Array
from tests.models.requests import embed, score, sequences, text_tower
from tests.models.tiny import (
    MULTI_VECTOR,
    WIDTH,
    byte_bpe,
    edit_json,
    save_body,
    write_json,
    write_modules,
)
from tests.models.tiny.bodies import modernbert_config
from tests.models.tiny.layout import edited, without

TEXTS = [
    "A man is eating food.",
    "The stock market, fell sharply today! (And rose?)",
    "naïve café, Ωmega 🙂",
    "short",
    "",
    "A function call with many arguments and one more. " * 60,
]
KINDS = [*MULTI_VECTOR, "bge-m3"]
LAYOUTS: tuple[Attention, ...] = ("packed", "padded")
TOLERANCE = 2e-5
SETTINGS = "config_sentence_transformers.json"


def vectors(model: Encoder, texts: list[str], role: str, **others: Any) -> tuple[Array, ...]:
    found = embed(model, texts, Output.MULTI_VECTOR, prompt_name=role, **others).multi_vector
    assert found is not None
    return found


def assert_same(found: tuple[Array, ...], wanted: list[Array] | tuple[Array, ...]) -> None:
    assert [rows.shape for rows in found] == [rows.shape for rows in wanted]
    for rows, right in zip(found, wanted, strict=True):
        assert np.abs(rows - right).max() < TOLERANCE


@pytest.mark.parametrize("attention", LAYOUTS)
@pytest.mark.parametrize("role", oracle.ROLES)
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_the_oracle(
    kind: str, role: oracle.Role, attention: Attention, tiny_folder: TinyFolder, load_tiny: LoadTiny
) -> None:
    model = load_tiny(kind, attention=attention)
    assert model.card.attention == attention
    assert_same(vectors(model, TEXTS, role), oracle.multi_vector(tiny_folder(kind), TEXTS, role=role))


@pytest.mark.parametrize("role", oracle.ROLES)
def test_vectors_of_the_original_layout_are_those_of_its_formula(
    role: oracle.Role, tiny_folder: TinyFolder, load_tiny: LoadTiny
) -> None:
    wanted = [oracle.stanford_colbert(tiny_folder("colbert-hf"), text, role=role) for text in TEXTS]
    assert_same(vectors(load_tiny("colbert-hf"), TEXTS, role), wanted)


@pytest.mark.parametrize("attention", LAYOUTS)
@pytest.mark.parametrize("role", oracle.ROLES)
@pytest.mark.parametrize("kind", ["colbert-pylate", "colbert-st-min", "bge-m3"])
def test_vectors_do_not_depend_on_the_batch(kind: str, role: str, attention: Attention, load_tiny: LoadTiny) -> None:
    model = load_tiny(kind, attention=attention)
    together = vectors(model, TEXTS, role)
    assert_same(vectors(model, TEXTS, role, alone=True), together)
    assert_same(vectors(model, TEXTS[::-1], role)[::-1], together)


@pytest.mark.parametrize("kind", MULTI_VECTOR)
def test_scores_are_maxsim(kind: str, tiny_folder: TinyFolder, load_tiny: LoadTiny) -> None:
    model, folder = load_tiny(kind), tiny_folder(kind)
    assert model.card.scoring == "late-interaction"
    query = oracle.multi_vector(folder, TEXTS[:1], role="query")[0]
    wanted = [oracle.maxsim(query, rows) for rows in oracle.multi_vector(folder, TEXTS, role="document")]
    assert np.abs(score(model, TEXTS[0], TEXTS).scores - wanted).max() < 1e-4


@pytest.mark.parametrize("kind", ["colbert-pylate", "colbert-st"])
def test_a_text_without_a_role_is_a_document(kind: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(kind)
    found = embed(model, TEXTS, Output.MULTI_VECTOR).multi_vector
    assert found is not None
    assert_same(found, vectors(model, TEXTS, "document"))


def test_what_fills_a_query_up_changes_no_other_vector(load_tiny: LoadTiny) -> None:
    model = load_tiny("colbert-pylate")
    request = EmbedRequest(inputs=(TextInput("short"),), outputs=frozenset({Output.MULTI_VECTOR}), prompt_name="query")
    filled = sequences(model, request)[0]
    own = len(filled.ids) - filled.unseen_tokens
    assert filled.unseen_tokens > 0
    assert len(set(filled.ids[own:])) == 1
    bare = TextInput(tuple(filled.ids[:own]))
    found = embed(model, ["short"], Output.MULTI_VECTOR, prompt_name="query").multi_vector
    assert found is not None
    request = EmbedRequest(inputs=(bare,), outputs=frozenset({Output.MULTI_VECTOR}), prompt_name="query")
    (alone,) = model.forward(sequences(model, request))
    assert isinstance(alone, Row)
    rows = alone.values[Output.MULTI_VECTOR]
    assert isinstance(rows, np.ndarray)
    assert np.abs(found[0][:own] - rows / np.linalg.norm(rows, axis=1, keepdims=True)).max() < TOLERANCE


def test_a_query_is_cut_without_being_asked_and_a_document_is_not(load_tiny: LoadTiny) -> None:
    model = load_tiny("colbert-pylate")
    assert len(vectors(model, TEXTS[-1:], "query", max_tokens=None)[0]) == 24
    with pytest.raises(InvalidInput, match="maximum context length is 64 tokens"):
        vectors(model, TEXTS[-1:], "document", max_tokens=None)


def test_usage_counts_the_expansion(load_tiny: LoadTiny) -> None:
    model = load_tiny("colbert-pylate")
    assert embed(model, ["short", "x"], Output.MULTI_VECTOR, prompt_name="query").usage.prompt_tokens == 2 * 24


def test_vectors_are_not_normalised_where_that_is_not_wanted(load_tiny: LoadTiny) -> None:
    model = load_tiny("colbert-pylate")
    rows = vectors(model, TEXTS[:1], "document", normalize=False)[0]
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    assert np.abs(lengths - 1).max() > 0.01
    assert_same((rows / lengths,), vectors(model, TEXTS[:1], "document"))


@pytest.mark.parametrize("kind", ["bert-mean", "bert-max-dense", "modernbert-cls", "t5-mean", "qwen3-last"])
def test_an_embedding_model_gives_the_last_layers_vectors_too(
    kind: str, tiny_folder: TinyFolder, load_tiny: LoadTiny
) -> None:
    model = load_tiny(kind)
    assert model.card.outputs == (Output.DENSE, Output.MULTI_VECTOR)
    assert model.card.scoring == "bi-encoder"
    theirs = oracle.loaded("SentenceTransformer", tiny_folder(kind))
    texts = TEXTS[:4]
    wanted = [
        theirs.encode([text], output_value="token_embeddings", show_progress_bar=False)[0].float().numpy()
        for text in texts
    ]
    found = embed(model, texts, Output.MULTI_VECTOR, normalize=False).multi_vector
    assert found is not None
    assert all(rows.shape[1] == WIDTH for rows in found)
    assert [rows.shape for rows in found] == [rows.shape for rows in wanted]
    for rows, right in zip(found, wanted, strict=True):
        assert np.abs(rows - right).max() < 2e-5 * max(1.0, float(np.abs(right).max()))


def test_outputs_of_one_request_are_those_of_each_alone(load_tiny: LoadTiny) -> None:
    model = load_tiny("bge-m3")
    every = (Output.DENSE, Output.SPARSE, Output.MULTI_VECTOR)
    assert model.card.outputs == (*every, Output.TOKEN_WEIGHTS)
    together = embed(model, TEXTS, *every)
    dense, sparse, multi = (embed(model, TEXTS, output) for output in every)
    assert np.abs(together.embeddings - dense.embeddings).max() < TOLERANCE
    assert together.sparse is not None
    assert sparse.sparse is not None
    for found, wanted in zip(together.sparse, sparse.sparse, strict=True):
        assert np.array_equal(found.indices, wanted.indices)
        assert np.allclose(found.values, wanted.values, atol=TOLERANCE)
    assert together.multi_vector is not None
    assert multi.multi_vector is not None
    assert_same(together.multi_vector, multi.multi_vector)
    assert (dense.sparse, dense.multi_vector, sparse.dense) == (None, None, None)


def test_one_head_does_not_run_for_another_output(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_tiny("bge-m3")

    def fail(*_: object) -> Any:
        raise AssertionError("this head was not asked for")

    monkeypatch.setattr(type(text_tower(model).heads[Output.MULTI_VECTOR]), "__call__", fail)
    assert embed(model, TEXTS, Output.DENSE, Output.SPARSE).sparse is not None


@pytest.fixture
def bge_m3(tiny_folder: TinyFolder) -> tuple[EngineConfig, list[Array]]:
    """Return the settings of an engine, and the answers that it must give."""
    folder = tiny_folder("bge-m3")
    config = EngineConfig(model=str(folder), dtype="float32", torch_threads=1)
    return config, oracle.multi_vector(folder, TEXTS, role="document")


@pytest.mark.anyio
async def test_an_engine_gives_all_outputs_of_one_request(bge_m3: tuple[EngineConfig, list[Array]]) -> None:
    config, wanted = bge_m3
    async with open_engine(config) as engine:
        result = await engine.embed(TEXTS, outputs=("dense", "sparse", "multi_vector"), max_tokens=MODEL_MAX)
    assert result.embeddings.shape == (len(TEXTS), WIDTH)
    assert result.sparse is not None
    assert result.multi_vector is not None
    assert_same(result.multi_vector, wanted)


def test_a_text_without_special_tokens_keeps_all_its_vectors(load_tiny: LoadTiny) -> None:
    for kind in ("bge-m3", "colbert-pylate"):
        model = load_tiny(kind)
        bare = TextInput("short", add_special_tokens=False)
        request = EmbedRequest(inputs=(bare,), outputs=frozenset({Output.MULTI_VECTOR}), prompt_name="query")
        (sequence,) = sequences(model, request)
        assert sequence.ids == model.tokenize("short", add_special_tokens=False).ids
        assert (sequence.unseen_tokens, sequence.kept) == (0, None)


# Folders


def test_what_the_hub_is_asked_for_includes_heads_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(_: str, *, allow_patterns: list[str], **others: object) -> str:
        asked.extend(allow_patterns)
        raise OSError("no disk")

    monkeypatch.setattr(resolver, "snapshot_download", download)
    with pytest.raises(ConfigError, match="cannot be stored"):
        resolver.resolve("some/model")
    for name in ("sparse_linear.pt", "colbert_linear.pt", "colbert_linear.safetensors", "artifact.metadata"):
        assert any(fnmatch(name, pattern) for pattern in asked)


@pytest.fixture(params=[True, False], ids=["markers are tokens", "markers are texts"])
def windowed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model with windows of 8 tokens, no mask token, and queries longer than that."""
    torch.manual_seed(1)
    tokenizer = byte_bpe(between="</s>")
    if request.param:
        tokenizer.add_tokens(["[Q] ", "[D] "])
    save_body(tmp_path, ModernBertModel(modernbert_config(len(tokenizer))), tokenizer)
    identity = "torch.nn.modules.linear.Identity"
    dense = {"in_features": WIDTH, "out_features": 24, "bias": False, "activation_function": identity}
    write_modules(tmp_path, ("pylate.models.Dense.Dense", dense))
    save_file({"linear.weight": torch.randn(24, WIDTH) / 6}, tmp_path / "1_Dense" / "model.safetensors")
    settings = {"model_type": "ColBERT", "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 40}
    write_json(tmp_path / SETTINGS, settings | {"document_length": 64})
    return tmp_path


@pytest.mark.parametrize("attention", LAYOUTS)
@pytest.mark.parametrize("role", oracle.ROLES)
def test_an_expansion_may_reach_beyond_the_window_of_a_layer(
    role: oracle.Role, attention: Attention, windowed: Path
) -> None:
    model = load_model(EngineConfig(model=str(windowed), dtype="float32", attention=attention))
    assert model.card.attention == attention
    assert_same(vectors(model, TEXTS, role), oracle.multi_vector(windowed, TEXTS, role=role))


def test_heads_of_bge_m3_may_be_safetensors_and_one_of_them_may_be_missing(
    copy: Callable[[str], Path], load_tiny: LoadTiny
) -> None:
    folder = copy("bge-m3")
    pickled = folder / "colbert_linear.pt"
    save_file(torch.load(pickled, weights_only=True), folder / "colbert_linear.safetensors")
    pickled.unlink()
    (folder / "sparse_linear.pt").unlink()
    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    assert model.card.outputs == (Output.DENSE, Output.MULTI_VECTOR)
    assert_same(vectors(model, TEXTS[:3], "document"), vectors(load_tiny("bge-m3"), TEXTS[:3], "document"))


def test_bge_m3_without_modules_is_pooled_as_bge_m3_is(copy: Callable[[str], Path], load_tiny: LoadTiny) -> None:
    folder = copy("bge-m3")
    for name in ("modules.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    assert "as in BGE-M3" in read_folder(folder, task="sparse").notes[0]
    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    found, wanted = (embed(each, TEXTS[:3], Output.DENSE).embeddings for each in (model, load_tiny("bge-m3")))
    assert np.abs(found - wanted).max() < TOLERANCE


def test_a_folder_without_expansion_gives_as_many_vectors_as_tokens(copy: Callable[[str], Path]) -> None:
    folder = copy("colbert-pylate")
    edit_json(folder / SETTINGS, do_query_expansion=False)
    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    assert_same(vectors(model, TEXTS, "query"), oracle.multi_vector(folder, TEXTS, role="query"))


@pytest.mark.parametrize("prompts", [{"document": "passage: "}, {"query": "query: "}, {}])
def test_a_query_does_not_get_the_prompt_of_documents(prompts: dict[str, str], copy: Callable[[str], Path]) -> None:
    folder = copy("colbert-st")
    edit_json(folder / SETTINGS, prompts=prompts)
    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    query, document = (oracle.multi_vector(folder, TEXTS[:1], role=role) for role in oracle.ROLES)
    assert_same(vectors(model, TEXTS[:1], "query"), query)
    assert_same(vectors(model, TEXTS[:1], "document"), document)
    wanted = oracle.maxsim(query[0], document[0])
    assert abs(score(model, TEXTS[0], TEXTS[:1]).scores[0] - wanted) < 1e-4


def test_the_original_layout_without_its_settings_is_read_with_the_usual_ones(copy: Callable[[str], Path]) -> None:
    folder = copy("colbert-hf")
    (folder / "artifact.metadata").unlink()
    roles = read_folder(folder).roles
    assert (roles["query"].marker, roles["query"].expand_to, roles["document"].marker) == ("[unused0]", 32, "[unused1]")


def without_projection(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["linear.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def narrow_projection(folder: Path) -> None:
    torch.save({"weight": torch.zeros(8, 16), "bias": torch.zeros(8)}, folder / "colbert_linear.pt")


def wrong_bias(folder: Path) -> None:
    torch.save({"weight": torch.zeros(8, WIDTH), "bias": torch.zeros(9)}, folder / "colbert_linear.pt")


def not_tensors(folder: Path) -> None:
    torch.save(["no", "tensors"], folder / "colbert_linear.pt")


def module_of_another_kind(folder: Path) -> None:
    path = folder / "modules.json"
    entries = json.loads(path.read_text())
    name = "sentence_transformers.multi_vector_encoder.modules.token_pooling.HierarchicalTokenPooling"
    path.write_text(json.dumps([*entries, {"idx": 9, "name": "9", "path": "", "type": name}]))


def no_normalisation(folder: Path) -> None:
    path = folder / "modules.json"
    path.write_text(json.dumps([e for e in json.loads(path.read_text()) if not e["type"].endswith("Normalize")]))


@pytest.mark.parametrize(
    ("kind", "spoil", "message"),
    [
        ("colbert-hf", without_projection, "model.safetensors: there is no tensor linear.weight"),
        ("colbert-hf", edited("artifact.metadata", similarity="l2"), "similarity='l2' is not supported"),
        ("colbert-hf", edited("artifact.metadata", query_maxlen=1000), "expanded to 1000 tokens"),
        ("colbert-hf", edited("artifact.metadata", query_maxlen="32"), "query_maxlen='32' must be of type int"),
        ("bge-m3", narrow_projection, "colbert_linear.pt: takes vectors of 16 values, but gets 32"),
        ("bge-m3", wrong_bias, "colbert_linear.pt: the weights cannot be used"),
        ("bge-m3", not_tensors, "colbert_linear.pt: the weights cannot be used: it holds a list"),
        ("colbert-pylate", without("1_Dense/model.safetensors"), "1_Dense: no model.safetensors"),
        ("colbert-pylate", edited(SETTINGS, skiplist_words=[1]), "skiplist_words must be texts"),
        ("colbert-pylate", edited(SETTINGS, similarity_fn_name="meanmaxsim"), "'meanmaxsim' is not supported"),
        ("colbert-st", module_of_another_kind, "module HierarchicalTokenPooling is not supported"),
        ("colbert-st", no_normalisation, "must be a Normalize"),
        ("colbert-st", edited("1_Dense/config.json", module_input_name="sentence_embedding"), "only token_embeddings"),
        ("colbert-st", edited("2_MultiVectorMask/config.json", keep_only_token_ids=[1]), "keep_only_token_ids"),
        ("colbert-st", edited("2_MultiVectorMask/config.json", skiplist_tasks="image"), "skiplist_tasks="),
        ("colbert-st", edited("sentence_bert_config.json", query_expansion={"strategy": "all"}), "strategy='all'"),
        ("colbert-st", edited("sentence_bert_config.json", query_expansion={"size": 3}), "size is not known"),
        ("colbert-st", edited("sentence_bert_config.json", transformer_task="fill-mask"), "transformer_task="),
        ("colbert-st", edited("sentence_bert_config.json", processing_kwargs={"text": {"a": 1}}), "processing_kwargs"),
    ],
)
def test_a_folder_that_is_not_understood_is_rejected(
    kind: str, spoil: Callable[[Path], None], message: str, copy: Callable[[str], Path]
) -> None:
    folder = copy(kind)
    spoil(folder)
    with pytest.raises(ConfigError, match=message):
        load_model(EngineConfig(model=str(folder), dtype="float32"))
