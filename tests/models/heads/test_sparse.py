"""Weights of a few entries of the vocabulary: the same as the oracle's, and never all logits at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from staged_pool import Pool
from staged_pool.runtime.card import Similarity
from staged_pool.runtime.config import Attention, EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.folders.folder import read_folder
from staged_pool.runtime.models.heads import sparse as sparse_heads
from staged_pool.runtime.models.heads.sparse import SpladeHead
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.specs.model import SpladeActivation, SpladePooling, SpladeSpec
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.payloads import Row, SparseVector, TokenSequence
from staged_pool.runtime.requests import EmbedRequest, Output, Outputs, ScoreRequest, TextInput
from staged_pool.runtime.results import ScoreResult
from staged_pool.runtime.tasks.plan import plan
from staged_pool.stages.errors import ConfigError, InvalidInput, ModelFailed, Unsupported
from tests.models import oracle
from tests.models.conftest import LoadTiny, TinyFolder
from tests.models.requests import embed, prepare, score, sequences, text_tower
from tests.models.tiny import edit_json
from tests.models.tiny.layout import edited, without

TEXTS = [
    "A man is eating food.",
    "The stock market, fell sharply today! (And rose?)",
    "naïve café, Ωmega 🙂",
    "short",
    "",
    "A function call with many arguments and one more. " * 60,
]
SPLADE = ["splade-bert", "splade-distilbert", "splade-sum"]
LAYOUTS: tuple[Attention, ...] = ("packed", "padded")
SPARSE_ONLY: Outputs = frozenset({Output.SPARSE})
TOLERANCE = 2e-5


def weights(model: Encoder, texts: Sequence[str], **others: Any) -> tuple[SparseVector, ...]:
    found = embed(model, texts, Output.SPARSE, **others).sparse
    assert found is not None
    return found


def assert_same(found: Sequence[SparseVector], wanted: Sequence[SparseVector | dict[int, float]]) -> None:
    """Entries may differ only where their weight is next to nothing."""
    assert len(found) == len(wanted)
    for vector, right in zip(found, wanted, strict=True):
        ours, theirs = as_dict(vector), right if isinstance(right, dict) else as_dict(right)
        assert all(abs(ours.get(i, 0.0) - theirs.get(i, 0.0)) < TOLERANCE for i in ours.keys() | theirs.keys())


def as_dict(vector: SparseVector) -> dict[int, float]:
    return dict(zip(vector.indices.tolist(), vector.values.tolist(), strict=True))


@pytest.mark.parametrize("attention", LAYOUTS)
@pytest.mark.parametrize("prompt_name", [None, "query"])
@pytest.mark.parametrize("kind", SPLADE)
def test_weights_are_those_of_the_oracle(
    kind: str, prompt_name: str | None, attention: Attention, tiny_folder: TinyFolder, load_tiny: LoadTiny
) -> None:
    model = load_tiny(kind, attention=attention)
    assert model.card.attention == attention
    assert model.card.outputs == (Output.SPARSE,)
    wanted = oracle.sparse(tiny_folder(kind), TEXTS, prompt_name=prompt_name)
    assert_same(weights(model, TEXTS, prompt_name=prompt_name), wanted)


@pytest.mark.parametrize("attention", LAYOUTS)
@pytest.mark.parametrize("kind", SPLADE)
def test_a_request_keeps_the_largest_weights(
    kind: str, attention: Attention, tiny_folder: TinyFolder, load_tiny: LoadTiny
) -> None:
    model = load_tiny(kind, attention=attention)
    whole = weights(model, TEXTS)
    for most in (1, 5, 10**6):
        found = weights(model, TEXTS, max_active_dims=most)
        assert_same(found, oracle.sparse(tiny_folder(kind), TEXTS, max_active_dims=most))
        assert_same(weights(model, TEXTS, max_active_dims=most, alone=True), found)
        assert [len(row.indices) for row in found] == [min(most, len(row.indices)) for row in whole]
    assert min(len(row.indices) for row in whole) > 5
    # Beside vectors of other kinds, from one forward.
    model = load_tiny("bge-m3", attention=attention)
    both = embed(model, TEXTS, Output.SPARSE, Output.DENSE, max_active_dims=2)
    assert both.sparse is not None
    for row, all_of_it in zip(both.sparse, weights(model, TEXTS), strict=True):
        largest = sorted(as_dict(all_of_it).items(), key=lambda entry: -entry[1])[:2]
        assert as_dict(row) == pytest.approx(dict(largest), abs=TOLERANCE)


def test_a_kept_result_is_of_any_number_of_weights(tiny_folder: TinyFolder) -> None:
    """The cache has whole rows: a request gets as many weights as it asks for, whatever was asked before."""
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "result_cache_mb": 8}
    with Pool(str(tiny_folder("splade-bert")), **settings) as pool:
        found = [pool.embed(TEXTS[0], outputs="sparse", max_active_dims=most).sparse for most in (3, None, 5, 3, None)]
        hits = pool.call(hits_of)
    counts = [len(one[0].indices) for one in found if one is not None]
    assert (counts[0], counts[2], counts[3]) == (3, 5, 3)
    assert counts[1] == counts[4] > 5
    assert hits == 4


async def hits_of(engine: Engine) -> int:
    kept = engine.statistics().result_cache
    return 0 if kept is None else kept.hits


@pytest.mark.parametrize(
    ("kind", "outputs", "most", "said"),
    [
        ("splade-bert", SPARSE_ONLY, 0, "max_active_dims must be at least 1, got 0"),
        ("splade-bert", SPARSE_ONLY, -3, "max_active_dims must be at least 1, got -3"),
        ("bge-m3", frozenset({Output.DENSE, Output.TOKEN_WEIGHTS}), 3, "max_active_dims is for sparse vectors"),
    ],
)
def test_a_wrong_number_of_weights_is_an_error(
    kind: str, outputs: Outputs, most: int, said: str, load_tiny: LoadTiny
) -> None:
    request = EmbedRequest(inputs=(TextInput("a"),), outputs=outputs, max_active_dims=most)
    with pytest.raises(InvalidInput, match=said) as caught:
        plan(request, load_tiny(kind).card)
    assert caught.value.param == "max_active_dims"


@pytest.mark.parametrize("attention", LAYOUTS)
def test_weights_of_bge_m3_are_those_of_the_oracle(
    attention: Attention, tiny_folder: TinyFolder, load_tiny: LoadTiny
) -> None:
    found = weights(load_tiny("bge-m3", attention=attention), TEXTS)
    assert_same(found, oracle.sparse(tiny_folder("bge-m3"), TEXTS))
    assert len(found[TEXTS.index("")].indices) == 0


@pytest.mark.parametrize("attention", LAYOUTS)
def test_weights_of_each_token_of_bge_m3_are_those_of_the_oracle(
    attention: Attention, tiny_folder: TinyFolder, load_tiny: LoadTiny
) -> None:
    model = load_tiny("bge-m3", attention=attention)
    assert model.tokenizer is not None
    both = embed(model, TEXTS, Output.SPARSE, Output.TOKEN_WEIGHTS)
    raw = embed(model, TEXTS, Output.TOKEN_WEIGHTS, normalize=False, alone=True).token_weights
    assert both.token_weights is not None
    assert both.sparse is not None
    assert raw is not None
    known = {model.tokenizer.shared.tokenizer.token_to_id(token) for token in ("<s>", "</s>", "<pad>", "<unk>")}
    negative = 0
    for text, found, before, sparse in zip(TEXTS, both.token_weights, raw, both.sparse, strict=True):
        ids, wanted = oracle.bge_m3_token_weights(tiny_folder("bge-m3"), text)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        np.testing.assert_allclose(np.maximum(before, 0), wanted, atol=1e-5)
        negative += int((before < 0).sum())
        largest: dict[int, float] = {}
        for token, weight in zip(ids, found.tolist(), strict=True):
            if token not in known and weight > largest.get(token, 0):
                largest[token] = weight
        assert as_dict(sparse) == pytest.approx(largest, abs=1e-5)
    assert negative, "some weights are below 0 before they are activated"


def test_tokens_that_nobody_put_around_a_text_have_their_weights(load_tiny: LoadTiny) -> None:
    model = load_tiny("bge-m3")
    assert model.card.outputs == (Output.DENSE, Output.SPARSE, Output.MULTI_VECTOR, Output.TOKEN_WEIGHTS)
    whole = model.tokenize("a text", add_special_tokens=True).ids
    request = EmbedRequest(
        inputs=(TextInput(tuple(whole)), TextInput(tuple(whole[1:-1])), TextInput((whole[0], whole[-1]))),
        outputs=frozenset({Output.TOKEN_WEIGHTS}),
    )
    prepared = prepare(model, request)
    rows = [model.forward([one.payload])[0] for one in prepared]
    lengths = [row.values[Output.TOKEN_WEIGHTS].size for row in rows if isinstance(row, Row)]
    assert lengths == [len(whole) - 2, len(whole) - 2, 0]


@pytest.mark.parametrize("kind", [*SPLADE, "bge-m3"])
def test_indices_ascend_and_weights_are_above_zero(kind: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(kind)
    for vector in weights(model, TEXTS):
        assert vector.indices.dtype == np.int32
        assert vector.values.dtype == np.float32
        assert vector.indices.shape == vector.values.shape
        assert (np.diff(vector.indices) > 0).all()
        assert (vector.values > 0).all()
        assert len(vector.indices) < model.card.vocabulary


@pytest.mark.parametrize("attention", LAYOUTS)
@pytest.mark.parametrize("kind", [*SPLADE, "bge-m3"])
def test_weights_do_not_depend_on_the_batch(kind: str, attention: Attention, load_tiny: LoadTiny) -> None:
    model = load_tiny(kind, attention=attention)
    together = weights(model, TEXTS)
    assert_same(weights(model, TEXTS, alone=True), together)
    assert_same(weights(model, TEXTS[::-1])[::-1], together)


@pytest.mark.parametrize("kind", SPLADE)
def test_scores_are_dot_products(kind: str, tiny_folder: TinyFolder, load_tiny: LoadTiny) -> None:
    model, folder = load_tiny(kind), tiny_folder(kind)
    assert (model.card.scoring, model.card.similarity) == ("sparse", "dot")
    query = oracle.sparse(folder, TEXTS[:1], prompt_name="query")[0]
    documents = oracle.sparse(folder, TEXTS, prompt_name="document")
    wanted = np.array([sum(w * each.get(i, 0.0) for i, w in query.items()) for each in documents])
    assert wanted.min() > 1
    assert np.abs(score(model, TEXTS[0], TEXTS).scores / wanted - 1).max() < 1e-4


def sparse_row(**entries: float) -> Row:
    indices = np.array([int(name[1:]) for name in entries], np.int32)
    vector = SparseVector(indices, np.array(list(entries.values()), np.float32))
    return Row({Output.SPARSE: vector}, TokenSequence([1], SPARSE_ONLY))


@pytest.mark.parametrize(
    ("similarity", "wanted"), [("dot", [10.0, 0.0, 0.0]), ("cosine", [10 / (5 * np.sqrt(20)), 0.0, 0.0])]
)
def test_a_sparse_score_counts_only_shared_entries(
    similarity: Similarity, wanted: list[float], load_tiny: LoadTiny
) -> None:
    card = replace(load_tiny("splade-bert").card, similarity=similarity)
    request = ScoreRequest(queries=("q",), documents=("a", "b", "c"))
    rows = [sparse_row(_3=3.0, _8=4.0), sparse_row(_3=2.0, _8=1.0, _9=15.0**0.5), sparse_row(_4=9.0), sparse_row()]
    result = plan(request, card).finish(rows, 4)
    assert isinstance(result, ScoreResult)
    assert np.allclose(result.scores, wanted)


# The head by itself


class Table:
    """Logits that are the token vectors themselves; remembers how many tokens came at once."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(self, hidden: Tensor) -> Tensor:
        self.tokens.append(hidden.shape[1])
        return hidden.clone()

    def parameters(self) -> int:
        return 0


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("lengths", [[3], [40], [3, 1, 40, 2, 2, 9, 17], [1] * 30])
def test_logits_are_never_all_there_at_once(
    pooling: SpladePooling, activation: SpladeActivation, lengths: list[int]
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(sum(lengths), 50) * 2
    table = Table()
    head = SpladeHead(SpladeSpec(pooling=pooling, activation=activation), table, 50, slice_bytes=8 * 50 * 4)
    batch = PackedBatch.of([TokenSequence([1] * n, SPARSE_ONLY) for n in lengths], torch.device("cpu"))
    found = head(hidden, batch)()
    assert max(table.tokens) <= 8
    assert sum(table.tokens) == sum(lengths)
    for vector, part in zip(found, torch.split(hidden, lengths), strict=True):
        assert isinstance(vector, SparseVector)
        active = part.relu().log1p()
        active = active.log1p() if activation == "log1p_relu" else active
        wanted = active.amax(dim=0) if pooling == "max" else active.sum(dim=0)
        assert vector.indices.tolist() == wanted.nonzero()[:, 0].tolist()
        assert np.allclose(vector.values, wanted[wanted > 0].numpy(), atol=1e-6)


def test_entries_are_found_in_what_was_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def hand_over(values: Tensor) -> Callable[[], Tensor]:
        order.append("handed over")

        def taken() -> Tensor:
            order.append("taken")
            return values + 1

        return taken

    monkeypatch.setattr(sparse_heads, "hand_over", hand_over)
    head = SpladeHead(SpladeSpec(pooling="max", activation="relu"), Table(), 2)
    later = head(torch.zeros(1, 2), PackedBatch.of([TokenSequence([1], SPARSE_ONLY)], torch.device("cpu")))
    assert order == ["handed over"]  # the device may still be at it
    (vector,) = later()
    assert order == ["handed over", "taken"]
    assert isinstance(vector, SparseVector)
    assert vector.indices.tolist() == [0, 1]


def test_a_weight_that_is_no_number_fails_its_row_alone(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("splade-bert", "bge-m3"):
        model = load_tiny(kind)
        hidden = type(text_tower(model).transformer).hidden

        def spoilt(body: object, batch: PackedBatch, hidden: Callable[..., Tensor] = hidden) -> Tensor:
            found = hidden(body, batch).clone()
            found[len(batch.sequences[0].ids) + 1] = torch.nan
            return found

        monkeypatch.setattr(type(text_tower(model).transformer), "hidden", spoilt)
        ids = [[5, 40, 6], [5, 41, 6], [5, 42, 6]]
        rows = model.forward([TokenSequence(each, SPARSE_ONLY) for each in ids])
        monkeypatch.undo()
        assert [isinstance(row, ModelFailed) for row in rows] == [False, True, False]


# Folders


def test_a_masked_language_model_is_a_splade_model_when_that_is_asked_for(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("splade-plain")
    model = load_model(EngineConfig(model=str(folder), dtype="float32", task="sparse"))
    assert model.card.outputs == (Output.SPARSE,)
    assert_same(weights(model, TEXTS), oracle.sparse(folder, TEXTS))


def test_a_masked_language_model_gives_embeddings_when_nothing_is_asked_for(tiny_folder: TinyFolder) -> None:
    model = load_model(EngineConfig(model=str(tiny_folder("splade-plain")), dtype="float32"))
    assert model.card.outputs == (Output.DENSE, Output.MULTI_VECTOR)
    assert read_folder(tiny_folder("splade-plain")).notes != ()
    with pytest.raises(Unsupported, match="gives no sparse output"):
        embed(model, TEXTS, Output.SPARSE)


def test_a_model_without_sparse_vectors_is_not_loaded_for_them(tiny_folder: TinyFolder) -> None:
    for kind in ("bert-mean", "bert-plain", "colbert-st"):
        with pytest.raises(ConfigError, match=r"not a model with sparse vectors|not a masked language model"):
            load_model(EngineConfig(model=str(tiny_folder(kind)), task="sparse"))


def test_the_similarity_of_the_folder_is_taken(copy: Callable[[str], Path]) -> None:
    folder = copy("splade-bert")
    edit_json(folder / "config_sentence_transformers.json", similarity_fn_name="cosine")
    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    assert np.abs(score(model, TEXTS[0], [TEXTS[0]]).scores).max() <= 1 + 1e-6


def test_a_prompt_goes_before_the_text(load_tiny: LoadTiny) -> None:
    model = load_tiny("splade-bert")
    request = ScoreRequest(queries=("short",), documents=("short",))
    query, document = sequences(model, request)
    assert len(query.ids) > len(document.ids)
    assert query.ids[-2:] == document.ids[-2:]


def one_more_module(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "modules.json"
        path.write_text(json.dumps([*json.loads(path.read_text()), {"idx": 9, "name": "9", "path": "", "type": name}]))

    return edit


def two_weights_a_token(folder: Path) -> None:
    torch.save({"weight": torch.zeros(2, 32), "bias": torch.zeros(2)}, folder / "sparse_linear.pt")


def no_weight(folder: Path) -> None:
    torch.save({"bias": torch.zeros(1)}, folder / "sparse_linear.pt")


POOLING = "1_SpladePooling/config.json"
SETTINGS = "config_sentence_transformers.json"


@pytest.mark.parametrize(
    ("kind", "spoil", "message"),
    [
        (
            "splade-bert",
            edited(POOLING, pooling_strategy="mean"),
            "pooling_strategy='mean' is not known, only max, sum",
        ),
        ("splade-bert", edited(POOLING, activation_function="gelu"), "activation_function='gelu' is not known"),
        ("splade-bert", without(POOLING), "no 1_SpladePooling/config.json"),
        ("splade-bert", edited("config.json", architectures=["BertModel"]), "is not a masked language model"),
        (
            "splade-bert",
            edited("sentence_bert_config.json", transformer_task="feature-extraction"),
            "must be fill-mask",
        ),
        (
            "splade-bert",
            without("sentence_bert_config.json"),
            "transformer_task='feature-extraction' must be fill-mask",
        ),
        ("splade-bert", edited(SETTINGS, max_active_dims=0), "max_active_dims"),
        ("splade-bert", edited(SETTINGS, similarity_fn_name="manhattan"), "not supported for sparse vectors"),
        (
            "splade-bert",
            one_more_module("sentence_transformers.sparse_encoder.modules.sparse_auto_encoder.SparseAutoEncoder"),
            "the chain is Transformer -> SpladePooling -> SparseAutoEncoder",
        ),
        ("splade-bert", one_more_module("custom.Module"), "custom.Module is the folder's own code"),
        ("bge-m3", two_weights_a_token, "sparse_linear: must give one weight for a token, it gives 2"),
        ("bge-m3", no_weight, "sparse_linear.pt: there is no tensor weight"),
    ],
)
def test_a_folder_that_is_not_understood_is_rejected(
    kind: str, spoil: Callable[[Path], None], message: str, copy: Callable[[str], Path]
) -> None:
    folder = copy(kind)
    spoil(folder)
    with pytest.raises(ConfigError, match=message):
        load_model(EngineConfig(model=str(folder), dtype="float32"))
