"""Zero-shot classification, against the pipeline of transformers on the same folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers as hf
from numpy.testing import assert_allclose

from staged_pool import Pool
from staged_pool.runtime.config import Attention, EngineConfig
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import (
    HYPOTHESIS,
    MODEL_MAX,
    Chat,
    ClassifyRequest,
    Image,
    PairInput,
    Side,
    TextInput,
)
from staged_pool.runtime.results import ClassifyResult
from staged_pool.runtime.tasks.plan import plan
from staged_pool.stages.errors import InvalidInput, TooLarge, Unsupported
from staged_pool.stages.work import Prepared
from tests.models import oracle
from tests.models.conftest import LoadTiny, TinyFolder
from tests.models.oracle import Array
from tests.models.requests import result_of
from tests.models.tiny.bodies import POSITIONS, WIDTH, Body, bert_config, roberta_config, save_body
from tests.models.tiny.classify import labelled
from tests.models.tiny.prompted import DEBERTA_POSITIONS
from tests.models.tiny.vocabularies import byte_bpe, unigram

LONG: Final = "A function call with many arguments. " * 30
TEXTS: Final = ["A man is eating food.", "naïve café, Ωmega 🙂", "short", LONG]
LABELS: Final = ["food", "a call of functions", "weather, rain", "naïve"]
CLOSE: Final = 2e-5


def _roberta(folder: Path) -> None:
    """As roberta-large-mnli."""
    tokenizer = byte_bpe()
    config = roberta_config(len(tokenizer), **labelled(("CONTRADICTION", "NEUTRAL", "ENTAILMENT")))
    save_body(folder, hf.RobertaForSequenceClassification(config), tokenizer, model_max_length=POSITIONS)


def _deberta(folder: Path) -> None:
    """As deberta-v3-base-zeroshot-v2.0: entailment is the first of two labels, so the last one contradicts."""
    tokenizer = unigram()
    settings = bert_config(len(tokenizer)).to_dict()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")
    config = hf.DebertaV2Config(
        vocab_size=len(tokenizer),
        pad_token_id=1,
        **{name: settings[name] for name in names},
        **labelled(("entailment", "not_entailment")),
        **DEBERTA_POSITIONS,
    )
    save_body(folder, hf.DebertaV2ForSequenceClassification(config), tokenizer, model_max_length=POSITIONS)


def _bart(folder: Path) -> None:
    """As bart-large-mnli."""
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
        **labelled(("contradiction", "neutral", "entailment")),
    )
    save_body(folder, hf.BartForSequenceClassification(config), tokenizer, model_max_length=POSITIONS)


BODIES: Final[dict[str, Body]] = {"roberta-mnli": _roberta, "deberta-zeroshot": _deberta, "bart-mnli": _bart}
KINDS: Final = ["ce-nli-3label", *BODIES]
FolderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    root = tmp_path_factory.mktemp("nli")

    def folder(kind: str) -> Path:
        if kind not in BODIES:
            return tiny_folder(kind)
        if not (path := root / kind).exists():
            torch.manual_seed(5)
            BODIES[kind](path)
        return path

    return folder


@pytest.fixture(scope="module")
def load(folder_of: FolderOf) -> Callable[..., Encoder]:
    loaded: dict[EngineConfig, Encoder] = {}

    def load(kind: str, **settings: Any) -> Encoder:
        config = EngineConfig(model=str(folder_of(kind)), dtype="float32", **settings)
        if config not in loaded:
            loaded[config] = load_model(config)
        return loaded[config]

    return load


def request(texts: Sequence[Any], labels: Sequence[str] | None = LABELS, **settings: Any) -> ClassifyRequest:
    inputs = tuple(TextInput(text, MODEL_MAX) if isinstance(text, str) else text for text in texts)
    return ClassifyRequest(inputs=inputs, candidate_labels=None if labels is None else tuple(labels), **settings)


def run(model: Encoder, given: ClassifyRequest) -> ClassifyResult:
    """Return the result of a request whose pairs are all in one batch."""
    result: ClassifyResult = result_of(model, given)
    return result


def expected(folder: Path, texts: Sequence[str], labels: Sequence[str], **settings: Any) -> Array:
    """Return the pipeline's scores in the order of the labels: [texts, labels]."""
    pipeline = oracle.pipeline_of("zero-shot-classification", folder)
    pipeline.tokenizer.model_max_length = POSITIONS
    found = pipeline(list(texts), list(labels), **settings)
    return np.array([[dict(zip(one["labels"], one["scores"], strict=True))[each] for each in labels] for one in found])


@pytest.mark.parametrize(
    ("kind", "attention"),
    [*((kind, "padded") for kind in KINDS), ("ce-nli-3label", "packed"), ("roberta-mnli", "packed")],
)
def test_scores_are_those_of_the_pipeline(
    kind: str, attention: Attention, folder_of: FolderOf, load: Callable[..., Encoder]
) -> None:
    """Several texts and one, exclusive labels and independent ones, and texts that are cut."""
    model, folder = load(kind, attention=attention), folder_of(kind)
    template = "About {}, {{or}} not."
    for settings in ({}, {"multi_label": True}, {"hypothesis_template": template}):
        wanted = expected(folder, TEXTS, LABELS, **settings)
        found = run(model, request(TEXTS, **settings))
        assert found.labels == tuple(LABELS)
        assert_allclose(found.scores, wanted, atol=CLOSE)
        alone = np.concatenate([run(model, request([text], **settings)).scores for text in TEXTS])
        assert_allclose(alone, found.scores, atol=CLOSE)
        assert np.ptp(wanted, axis=1).max() > 0.01  # the labels matter
    assert_allclose(run(model, request(TEXTS)).scores.sum(axis=1), 1, atol=1e-6)
    assert_allclose(run(model, request(TEXTS, LABELS[:1])).scores, expected(folder, TEXTS, LABELS[:1]), atol=CLOSE)


def test_logits_have_the_scores(load: Callable[..., Encoder]) -> None:
    model = load("roberta-mnli")
    raw = run(model, request(TEXTS, activate=False))
    powers = np.exp(raw.scores)
    usual = run(model, request(TEXTS))
    assert raw.logits is None
    assert_allclose(powers / powers.sum(axis=1, keepdims=True), usual.scores, atol=1e-6)
    assert usual.logits is not None
    assert_allclose(usual.logits, raw.scores)
    raw = run(model, request(TEXTS, activate=False, multi_label=True))
    assert_allclose(1 / (1 + np.exp(-raw.scores)), run(model, request(TEXTS, multi_label=True)).scores, atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_only_the_text_is_cut(side: Side, folder_of: FolderOf, load: Callable[..., Encoder]) -> None:
    """Also where the label is the longer one; the pair rule of rerankers would cut it."""
    model = load("roberta-mnli")
    tokenizer = hf.AutoTokenizer.from_pretrained(folder_of("roberta-mnli"), truncation_side=side)
    label = "function call with arguments " * 4
    for text, limit in ((LONG, MODEL_MAX), (LONG, 60), ("A man is eating food.", 30)):
        given = request([TextInput(text, limit, side)], [label])
        (prepared,) = model.preprocess(plan(given, model.card).inputs)
        assert isinstance(prepared, Prepared)
        wanted = tokenizer(
            text,
            HYPOTHESIS.format(label),
            truncation="only_first",
            max_length=POSITIONS if limit == MODEL_MAX else limit,
        )
        assert isinstance(prepared.payload, TokenSequence)
        assert prepared.payload.ids == wanted["input_ids"]
        assert len(prepared.payload.ids) == (POSITIONS if limit == MODEL_MAX else limit)


def test_a_label_that_leaves_no_room_is_an_error(load: Callable[..., Encoder]) -> None:
    with pytest.raises(InvalidInput, match=r"One of candidate_labels has at least 1.. tokens.*room for 92") as caught:
        run(load("roberta-mnli"), request(["a"], ["food", "function call with arguments " * 35]))
    assert (caught.value.param, caught.value.index) == ("candidate_labels", None)
    with pytest.raises(InvalidInput, match="This model's maximum context length is"):
        run(load("roberta-mnli"), request([TextInput(LONG)]))
    # No shorter text would help, so the label is to blame here, too.
    with pytest.raises(InvalidInput, match=r"One of candidate_labels has at least 1.. tokens.*room for 92") as caught:
        run(load("roberta-mnli"), request([TextInput("a")], ["food", "function call with arguments " * 35]))
    assert caught.value.param == "candidate_labels"


@pytest.mark.parametrize(
    ("given", "said", "param"),
    [
        (request(["a"], []), "candidate_labels has no label", "candidate_labels"),
        (request(["a"], ["b", " "]), "Label 1 of candidate_labels is empty", "candidate_labels"),
        (request(["a"], ["b", "c", "b"]), "Label 2 of candidate_labels stands there twice", "candidate_labels"),
        (request(["a"], ["b", "c" * 1025]), "Label 1 of candidate_labels has more than 1024", "candidate_labels"),
        (request(["a"], hypothesis_template="{}" * 513), "more than 1024 characters", "hypothesis_template"),
        (request(["a"], ["\ud800"]), "Label 0 of candidate_labels is not valid Unicode", "candidate_labels"),
        *(
            (request(["a"], hypothesis_template=template), "must have {} exactly once", "hypothesis_template")
            for template in ("It is so.", "{} and {}", "{name}", "{0.__class__}", "{!r}", "{:>9}", "a { b {}", "{{}}")
        ),
        (request([(TextInput((1, 2)))]), "each input must be a text", "input"),
        (request(["a", TextInput(Chat(()))]), "each input must be a text", "input"),
        (request(["a", PairInput(first="a", second="b")]), "each input must be a text", "input"),
        (request(["a", Image(b"x")]), "each input must be a text", "input"),
        (request([TextInput("a", add_special_tokens=False)]), "cannot be left out", "add_special_tokens"),
        (request(["a"], None, multi_label=True), "multi_label is for candidate_labels", "multi_label"),
        (request(["a"], None, hypothesis_template="{}"), "hypothesis_template is for", "hypothesis_template"),
    ],
)
def test_what_is_wrong_is_said(given: ClassifyRequest, said: str, param: str, load: Callable[..., Encoder]) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        plan(given, load("roberta-mnli").card)
    assert caught.value.param == param
    if param == "input":
        assert caught.value.index == len(given.inputs) - 1


@pytest.mark.parametrize(
    ("kind", "has"),
    [("seqcls-multiclass", "anger, joy, fear, love"), ("ce-bert-1label", "LABEL_0"), ("bert-mean", "none")],
)
def test_other_models_say_which_labels_they_have(kind: str, has: str, load_tiny: LoadTiny) -> None:
    with pytest.raises(Unsupported, match=f"begins with `entail`. Its labels: {has}."):
        plan(request(["a"]), load_tiny(kind).card)


def test_a_pool_divides_long_calls(folder_of: FolderOf, load: Callable[..., Encoder]) -> None:
    """Each text with each label is an item: 300 texts with 10 labels are more than one request may have."""
    texts = [f"{text[:40]} {number}" for number in range(75) for text in TEXTS]
    labels = [f"label {number}" for number in range(10)]
    wanted = run(load("ce-nli-3label"), request(texts[:4], labels)).scores
    with Pool(str(folder_of("ce-nli-3label")), dtype="float32", device="cpu") as pool:
        found = pool.classify(texts, candidate_labels=labels)
        assert found.scores.shape == (300, 10)
        assert_allclose(found.scores[:4], wanted, atol=CLOSE)
        assert_allclose(pool.classify(texts[:4], candidate_labels=",".join(labels)).scores, wanted, atol=CLOSE)
        with pool.classify_stream(iter(texts[:4]), candidate_labels=labels) as rows:
            assert_allclose([row for _, row in rows], wanted, atol=CLOSE)
        with pytest.raises(
            TooLarge, match="1 texts with 2049 candidate_labels are 2049 pairs; a request may have 2048"
        ):
            pool.classify("a", candidate_labels=list(map(str, range(2049))))
        with pytest.raises(InvalidInput, match="candidate_labels must be texts"):
            pool.classify("a", candidate_labels=[1])  # type: ignore[list-item]
