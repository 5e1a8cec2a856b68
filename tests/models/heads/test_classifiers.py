"""Models that give labels, against transformers and sentence-transformers on the same folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from staged_pool.runtime.config import Attention, EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.payloads import Row
from staged_pool.runtime.requests import MODEL_MAX, Output, PairInput, TextInput
from staged_pool.runtime.tasks.classify import activated
from staged_pool.stages.errors import Unsupported
from staged_pool.stages.work import Prepared
from tests.models import oracle, tiny
from tests.models.conftest import LoadTiny, TinyFolder
from tests.models.loading import ask, rejection
from tests.models.oracle import Array, Pair
from tests.models.tiny import edit_json

T = TypeVar("T")

TEXTS = ["A man is eating food.", "", "naïve café, Ωmega 🙂 𝔘", "short", "A function call with many arguments. " * 60]
PAIRS = [(TEXTS[0], "Someone has a meal."), (TEXTS[2], TEXTS[3]), (TEXTS[3], ""), (TEXTS[0], TEXTS[4])]

LAYOUTS: list[Attention] = ["packed", "padded"]
ENCODED_PAIRS = [kind for kind in tiny.CROSS_ENCODERS if kind != "ce-qwen3-lm"]
CUT_PAIRS = [kind for kind in ENCODED_PAIRS if kind != "ce-qwen3-seqcls"]


def values(model: Encoder, sources: Sequence[TextInput | PairInput], output: Output) -> list[Array]:
    """Return the model's values of each input, in one batch."""
    prepared = model.preprocess([ModelInput(source, frozenset({output})) for source in sources])
    sequences = []
    for one in prepared:
        assert isinstance(one, Prepared)
        sequences.append(one.payload)
    found = []
    for row in model.forward(sequences):
        assert isinstance(row, Row)
        value = row.values[output]
        assert isinstance(value, np.ndarray)
        found.append(value)
    return found


def logits(model: Encoder, texts: Sequence[str]) -> Array:
    return np.stack(values(model, [TextInput(text, MODEL_MAX) for text in texts], Output.LABELS))


def pair_logits(model: Encoder, pairs: Sequence[Pair]) -> Array:
    sources = [PairInput(first=first, second=second, max_tokens=MODEL_MAX) for first, second in pairs]
    return np.stack(values(model, sources, Output.LABELS))


# The same numbers as the oracle's


@pytest.mark.parametrize("attention", LAYOUTS)
@pytest.mark.parametrize("kind", tiny.CLASSIFIERS)
def test_logits_and_scores_of_texts_are_those_of_transformers(
    kind: str, attention: Attention, tiny_folder: TinyFolder, load_tiny: LoadTiny
) -> None:
    model, folder = load_tiny(kind, attention=attention), tiny_folder(kind)
    texts = [text for text in TEXTS if text or kind != "reward-qwen3"]  # whose tokenizer makes nothing of no text
    found = logits(model, texts)
    assert np.abs(found - oracle.labels(folder, texts, activate=False)).max() < 2e-5
    assert np.abs(activated(found, model.card.activation) - oracle.labels(folder, texts)).max() < 1e-4


@pytest.mark.parametrize("attention", LAYOUTS)
@pytest.mark.parametrize("kind", tiny.CROSS_ENCODERS)
def test_logits_of_pairs_are_those_of_sentence_transformers(
    kind: str, attention: Attention, tiny_folder: TinyFolder, load_tiny: LoadTiny
) -> None:
    pairs = PAIRS if kind in CUT_PAIRS else PAIRS[:3]
    found = pair_logits(load_tiny(kind, attention=attention), pairs)
    expected = oracle.scores(tiny_folder(kind), pairs, activate=False).reshape(found.shape)
    assert np.abs(found - expected).max() < 2e-5


@pytest.mark.parametrize("attention", LAYOUTS)
@pytest.mark.parametrize("kind", tiny.TOKEN_CLASSIFIERS)
def test_logits_of_tokens_are_those_of_transformers(
    kind: str, attention: Attention, tiny_folder: TinyFolder, load_tiny: LoadTiny
) -> None:
    model = load_tiny(kind, attention=attention)
    found = values(model, [TextInput(text, MODEL_MAX) for text in TEXTS], Output.TOKEN_LABELS)
    for text, of_tokens in zip(TEXTS, found, strict=True):
        expected = oracle.token_labels(tiny_folder(kind), text)
        assert of_tokens.shape == expected.shape
        assert np.abs(of_tokens - expected).max() < 5e-5  # these logits are around 10


@pytest.mark.parametrize("kind", [*CUT_PAIRS, "ce-qwen3-seqcls"])
def test_a_pair_scores_the_same_alone_in_a_batch_and_in_any_order(kind: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(kind)
    together = pair_logits(model, PAIRS)
    alone = np.concatenate([pair_logits(model, [pair]) for pair in PAIRS])
    assert np.abs(together - alone).max() < 2e-5
    assert np.abs(together - pair_logits(model, PAIRS[::-1])[::-1]).max() < 2e-5


@pytest.mark.parametrize("kind", ["ce-bert-1label", "ce-xlmr-reranker", "ce-modernbert-mean", "ce-qwen3-lm"])
def test_bfloat16_stays_close(kind: str, load_tiny: LoadTiny) -> None:
    pairs = [(a, b) for a in TEXTS[:4] for b in TEXTS[:4]]
    whole, half = (pair_logits(load_tiny(kind, dtype=dtype), pairs)[:, 0] for dtype in ("float32", "bfloat16"))
    assert np.corrcoef(whole, half)[0, 1] > 0.99


# Model cards


@pytest.mark.parametrize(
    ("kind", "labels", "activation", "scoring"),
    [
        ("ce-bert-1label", ("LABEL_0",), "sigmoid", "cross-encoder"),
        ("ce-bert-identity", ("LABEL_0",), "identity", "cross-encoder"),
        ("ce-bert-old", ("LABEL_0",), "identity", "cross-encoder"),
        ("ce-xlmr-reranker", ("LABEL_0",), "sigmoid", "cross-encoder"),
        ("ce-qwen3-lm", ("LABEL_0",), "identity", "cross-encoder"),
        ("ce-modular", ("LABEL_0",), "identity", "cross-encoder"),
        ("ce-modular-3label", ("LABEL_0", "LABEL_1", "LABEL_2"), "identity", None),
        ("ce-nli-3label", ("contradiction", "entailment", "neutral"), "softmax", None),
        ("seqcls-multilabel", ("toxic", "obscene", "insult"), "sigmoid", None),
        ("seqcls-regression", ("quality",), "identity", "cross-encoder"),
    ],
)
def test_the_card_names_labels_activation_and_scoring(
    kind: str, labels: tuple[str, ...], activation: str, scoring: str | None, load_tiny: LoadTiny
) -> None:
    card = load_tiny(kind).card
    assert (card.labels, card.activation, card.scoring) == (labels, activation, scoring)
    assert card.outputs == (Output.LABELS,)
    assert card.width == 0


@pytest.mark.parametrize("kind", [*tiny.CROSS_ENCODERS, *tiny.CLASSIFIERS, *tiny.TOKEN_CLASSIFIERS])
def test_every_kind_runs_packed(kind: str, load_tiny: LoadTiny) -> None:
    assert load_tiny(kind).card.attention == "packed"


# Through an engine


@pytest.mark.parametrize("kind", ["ce-bert-1label", "ce-bert-identity", "ce-modernbert", "ce-modular", "ce-qwen3-lm"])
def test_an_engine_scores_and_ranks_as_sentence_transformers(kind: str, tiny_folder: TinyFolder) -> None:
    folder, documents = tiny_folder(kind), [TEXTS[3], TEXTS[2], "Someone has a meal."]
    expected = oracle.scores(folder, [(TEXTS[0], document) for document in documents])

    async def question(engine: Engine) -> Any:
        return await engine.score(TEXTS[0], documents), await engine.rerank(TEXTS[0], documents, top_n=2)

    scored, ranked = ask(folder, question)
    assert np.abs(scored.scores - expected).max() < 1e-4
    assert [one.index for one in ranked.ranking] == np.argsort(-expected, kind="stable")[:2].tolist()


def test_an_engine_classifies_texts_and_pairs(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("ce-nli-3label")
    expected = oracle.scores(folder, PAIRS[:2], activate=False)
    found = ask(folder, lambda engine: engine.classify(PAIRS[:2], activate=False))
    assert np.abs(found.scores - expected).max() < 1e-4
    assert found.labels == ("contradiction", "entailment", "neutral")
    of_texts = ask(folder, lambda engine: engine.classify(TEXTS[:1]))
    assert np.abs(of_texts.scores - oracle.labels(folder, TEXTS[:1])).max() < 1e-4


def test_a_model_of_several_labels_scores_no_pairs(tiny_folder: TinyFolder) -> None:
    with pytest.raises(Unsupported, match="cannot score pairs"):
        ask(tiny_folder("ce-nli-3label"), lambda engine: engine.score("a", ["b"]))


# Language models as rerankers


def test_a_plain_language_model_scores_where_the_user_says_so(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """The folder with sentence-transformers' files asks the same question, so both give one score."""
    saved = tiny_folder("ce-qwen3-lm")
    plain = shutil.copytree(saved, tmp_path / "plain")
    unsaid = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "chat_template.jinja")
    for name in unsaid:
        (plain / name).unlink()
    found = ask(plain, lambda engine: engine.score(TEXTS[0], TEXTS[2:4], activate=False), task="score")
    assert np.abs(found.scores - oracle.scores(saved, [(TEXTS[0], text) for text in TEXTS[2:4]])).max() < 1e-4
    assert load_model(EngineConfig(model=str(plain), task="score")).card.activation == "sigmoid"
    embedder = load_model(EngineConfig(model=str(plain), task="embed"))
    assert embedder.card.outputs == (Output.DENSE, Output.MULTI_VECTOR)


def test_the_users_template_replaces_the_question(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("ce-qwen3-lm")
    model = load_model(EngineConfig(model=str(folder), score_template="{query} / {document}", dtype="float32"))
    found = pair_logits(model, PAIRS[:2])
    for (first, second), value in zip(PAIRS, found, strict=False):
        assert np.abs(value - answer(folder, f"{first} / {second}")) < 2e-5


def answer(folder: Path, text: str) -> float:
    """Return the odds of yes against no behind a text, for this folder's model."""
    model = oracle.loaded("CrossEncoder", folder)
    yes, no = model.tokenizer.convert_tokens_to_ids(["yes", "no"])
    ids = model.tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        of_last = model[0].model(input_ids=ids).logits[0, -1]
    return float(of_last[yes] - of_last[no])


# Templates of pairs


def test_a_chat_template_for_pairs_is_used_by_a_classifier_too(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("ce-qwen3-seqcls"), tmp_path / "model")
    role = '{{ messages | selectattr("role", "eq", "%s") | map(attribute="content") | first }}'
    (folder / "chat_template.jinja").write_text(f"Q: {role % 'query'} D: {role % 'document'} Is D right?")
    found = ask(folder, lambda engine: engine.score(TEXTS[0], TEXTS[2:4]))
    assert np.abs(found.scores - oracle.scores(folder, [(TEXTS[0], text) for text in TEXTS[2:4]])).max() < 1e-4


def test_the_folders_prompt_goes_before_the_first_text(folder: Path) -> None:
    settings = {"model_type": "CrossEncoder", "prompts": {"ask": "Find: "}, "default_prompt_name": "ask"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    found = ask(folder, lambda engine: engine.score(TEXTS[0], TEXTS[2:4]))
    expected = oracle.scores(folder, [(TEXTS[0], text) for text in TEXTS[2:4]], prompt="Find: ")
    assert np.abs(found.scores - expected).max() < 1e-4


def test_the_folders_prompt_is_what_a_language_model_is_told_to_look_for(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder("ce-qwen3-lm"), tmp_path / "model")
    file = folder / "config_sentence_transformers.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"default_prompt_name": "query"}))
    found = ask(folder, lambda engine: engine.score(TEXTS[0], TEXTS[2:4]))
    pairs = [(TEXTS[0], text) for text in TEXTS[2:4]]
    expected = oracle.scores(folder, pairs, prompt="Find passages that answer the question")
    assert np.abs(found.scores - expected).max() < 1e-4
    assert np.abs(found.scores - oracle.scores(tiny_folder("ce-qwen3-lm"), pairs)).max() > 1e-3


def test_a_chat_template_is_given_the_arguments_that_the_folder_names(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """As zerank-2 is published: one answer, no activation, and a template that wants `add_generation_prompt`."""
    folder = shutil.copytree(tiny_folder("ce-qwen3-lm"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_start|>{{ 'system' if message.role == 'query' else 'user' }}\n"
        "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    settings = json.loads((folder / "sentence_bert_config.json").read_text())
    (folder / "sentence_bert_config.json").write_text(
        json.dumps(settings | {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}})
    )
    score = folder / "1_LogitScore" / "config.json"
    score.write_text(
        json.dumps({"true_token_id": json.loads(score.read_text())["true_token_id"], "false_token_id": None})
    )
    found = ask(folder, lambda engine: engine.score(TEXTS[0], TEXTS[2:4]))
    assert np.abs(found.scores - oracle.scores(folder, [(TEXTS[0], text) for text in TEXTS[2:4]])).max() < 1e-4


@pytest.mark.parametrize("kind", ["ce-bert-1label", "ce-modular", "ce-qwen3-lm"])
def test_what_sentence_transformers_saves_again_gives_the_same_scores(
    kind: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    oracle.loaded("CrossEncoder", tiny_folder(kind)).save_pretrained(str(tmp_path / "saved"))
    found = ask(tmp_path / "saved", lambda engine: engine.score(TEXTS[0], TEXTS[2:4]))
    expected = oracle.scores(tiny_folder(kind), [(TEXTS[0], text) for text in TEXTS[2:4]])
    assert np.abs(found.scores - expected).max() < 1e-4


# Rejected folders


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        ("4_Dense", {"module_output_name": "logits"}, "module_output_name='logits' is not supported, only scores"),
        ("4_Dense", {"module_input_name": "token_embeddings"}, "module_input_name='token_embeddings' is not supported"),
        ("2_Dense", {"module_output_name": "scores"}, "module_output_name='scores' is not supported"),
        ("4_Dense", {"in_features": 21}, "4_Dense: takes vectors of 21 values, but gets 20"),
        ("1_Pooling", {"include_prompt": False}, "include_prompt=false is not supported for a cross-encoder"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "must be feature-extraction"),
        ("sentence_bert_config.json", {"module_output_name": "pooler"}, "only token_embeddings"),
        ("config_sentence_transformers.json", {"activation_fn": "mine.Own"}, "activation_fn='mine.Own' is not known"),
    ],
)
def test_a_chain_of_modules_that_does_something_else_is_rejected(
    module: str, settings: dict[str, Any], message: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder("ce-modular"), tmp_path / "model")
    edit_json(folder / module if module.endswith(".json") else folder / module / "config.json", **settings)
    assert message in rejection(folder)


def test_a_chain_of_modules_without_scores_is_rejected(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("ce-modular"), tmp_path / "model")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:4]))
    chain = "Transformer -> Pooling -> Dense -> LayerNorm"
    assert f"modules.json: {chain} is not supported for a cross-encoder" in rejection(folder)


@pytest.fixture
def folder(tiny_folder: TinyFolder, tmp_path: Path) -> Path:
    """A copy of `ce-bert-1label` that a test may change."""
    return shutil.copytree(tiny_folder("ce-bert-1label"), tmp_path / "model")


def change(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("name", ["classifier.weight", "classifier.bias", "bert.pooler.dense.weight"])
def test_missing_weights_of_a_head_are_rejected(name: str, folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    assert f"{name} is missing or of another shape (1 such in all)" in rejection(folder)


def test_more_labels_than_weights_are_rejected(folder: Path) -> None:
    change(folder, id2label={"0": "bad", "1": "good"}, label2id={"bad": 0, "good": 1})
    assert "classifier.bias is missing or of another shape" in rejection(folder)


def test_two_numbers_of_labels_are_rejected(folder: Path) -> None:
    change(folder, num_labels=3)
    assert rejection(folder) == "config.json: num_labels=3, but id2label names 1 labels"


def test_a_gap_in_the_labels_is_rejected(folder: Path) -> None:
    change(folder, id2label={"0": "bad", "2": "good"})
    assert rejection(folder) == "config.json: id2label must have the keys 0 to 1, one per label"


@pytest.mark.parametrize("name", ["torch.nn.modules.activation.Tanh", "mine.Sigmoid"])
def test_an_unknown_activation_is_rejected(name: str, folder: Path) -> None:
    change(folder, sentence_transformers={"activation_fn": name})
    message = f"config.json: sentence_transformers: activation_fn={name!r} is not known"
    assert rejection(folder).startswith(message)


def test_code_of_the_folders_own_is_rejected(folder: Path) -> None:
    change(folder, model_type="mine", auto_map={"AutoModelForSequenceClassification": "mine.Mine"})
    assert "--trust-remote-code" in rejection(folder)


def test_code_of_the_folders_own_runs_where_the_user_trusts_it(
    folder: Path, tmp_path: Path, load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    plain = load_tiny("ce-bert-1label")
    change(
        folder,
        auto_map={"AutoModelForSequenceClassification": "mine.Mine"},
        architectures=["MineForSequenceClassification"],
    )
    (folder / "mine.py").write_text(
        "from transformers import BertForSequenceClassification\n\n\n"
        "class Mine(BertForSequenceClassification):\n"
        "    def forward(self, *arguments, **others):\n"
        "        given = super().forward(*arguments, **others)\n"
        "        given.logits = given.logits + 1\n"
        "        return given\n"
    )
    assert "is not a sequence classifier" in rejection(folder)
    trusted = load_model(EngineConfig(model=str(folder), dtype="float32", trust_remote_code=True))
    assert np.abs(pair_logits(trusted, PAIRS) - 1 - pair_logits(plain, PAIRS)).max() < 2e-5


def test_a_class_that_transformers_does_not_have_is_rejected(folder: Path) -> None:
    change(folder, architectures=["MineForSequenceClassification"])
    assert "['MineForSequenceClassification'] is not a sequence classifier" in rejection(folder)


def test_pickled_weights_that_hold_more_than_tensors_need_the_users_word(folder: Path) -> None:
    safe = load_model(EngineConfig(model=str(folder), dtype="float32"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    pickled = load_model(EngineConfig(model=str(folder), dtype="float32"))
    assert np.array_equal(pair_logits(pickled, PAIRS), pair_logits(safe, PAIRS))
    torch.save(tensors | {"extra": Remembers(folder / "ran")}, folder / "pytorch_model.bin")
    assert rejection(folder).endswith(
        "hold more than tensors (exec): loading them may run code from the file. Convert them to "
        "model.safetensors, or set allow_pickle (--allow-pickle) if you trust them"
    )
    assert not (folder / "ran").exists()
    allowed = load_model(EngineConfig(model=str(folder), dtype="float32", allow_pickle=True))
    assert (folder / "ran").exists()
    assert np.array_equal(pair_logits(allowed, PAIRS), pair_logits(safe, PAIRS))


class Remembers:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"import pathlib; pathlib.Path({str(self._path)!r}).touch()",)


def test_a_score_of_several_labels_is_rejected(tiny_folder: TinyFolder) -> None:
    assert "has 3 labels, but a score needs exactly one" in rejection(tiny_folder("ce-nli-3label"), task="score")


def test_a_template_is_rejected_where_nothing_reads_pairs(tiny_folder: TinyFolder) -> None:
    assert "score_template" in rejection(tiny_folder("bert-mean"), score_template="{query} {document}")


def test_a_classifier_gives_vectors_where_the_user_says_so(folder: Path) -> None:
    card = load_model(EngineConfig(model=str(folder), task="embed")).card
    assert card.outputs == (Output.DENSE, Output.MULTI_VECTOR)
