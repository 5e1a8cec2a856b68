"""The plugin of GLiNER models: entities as by plain formulas, alone and in company, and folders it does not read."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from gliner_entities.decode import find_entities
from gliner_entities.model import load_model
from gliner_entities.plugin import VARIABLE, GlinerEntities
from gliner_entities.prompt import PromptWriter, split_words
from gliner_entities.settings import read_settings
from staged_pool import ConfigError, EngineConfig, InvalidInput, PluginSetup, open_engine
from tests.examples.entities.gliner_oracle import Entity, Oracle, make_folder
from tests.packaging.floors import ROOT

CONFIG = EngineConfig(device="cpu", torch_threads=1)
TEXTS = [
    "Ada Lovelace, the daughter of Lord Byron, lived in London.",
    "short",
    "A class-body is executed; naïve café in São-Paulo_2 — 3.5% of Ω",
    "The function returns None? (It does not raise.)",
]
LABELS = ["person", "city", "a long label of several words", "mark"]
KINDS: dict[str, dict[str, Any]] = {
    "deberta": {},
    "pickled, two layers": {"pickled": True, "num_rnn_layers": 2},
    "no lstm, same width": {"num_rnn_layers": 0, "hidden_size": 32},
    "label after mark": {"embed_ent_token": False},
    "bert": {"encoder": "bert"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_folder(tmp_path_factory.mktemp("gliner") / "model", **KINDS[kind])
        return made[kind]

    return folder


@pytest.fixture(scope="module")
def oracle(folders: Callable[[str], Path]) -> Oracle:
    return Oracle(folders("deberta"))


@pytest.mark.parametrize("kind", KINDS)
def test_spans_have_the_oracles_scores_alone_and_in_company(kind: str, folders: Callable[[str], Path]) -> None:
    torch.set_num_threads(1)
    folder = folders(kind)
    settings, oracle = read_settings(folder), Oracle(folder)
    model = load_model(folder, settings)
    writer = PromptWriter(folder, settings, model.max_tokens)
    asked = [LABELS, LABELS[:1], LABELS[::-1], LABELS[1:3]]
    prompts = [
        writer.write(text, split_words(text), labels, "data.text") for text, labels in zip(TEXTS, asked, strict=True)
    ]
    wanted = [oracle.probabilities(text, labels) for text, labels in zip(TEXTS, asked, strict=True)]
    assert np.ptp(np.concatenate([scores[scores > 0] for scores in wanted])) > 0.5
    with torch.inference_mode():
        together = [scores.numpy() for scores in model(prompts)]
        alone = [model([prompt])[0].numpy() for prompt in prompts]
    for found in (together, alone):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.shape == theirs.shape
            assert np.abs(ours - theirs).max() < 1e-5


def entities(found: list[dict[str, Any]]) -> list[Entity]:
    return [(each["start"], each["end"], each["label"], each["score"]) for each in found]


def same(found: list[dict[str, Any]], wanted: list[Entity], text: str) -> None:
    assert [each[:3] for each in entities(found)] == [each[:3] for each in wanted]
    assert np.allclose([each["score"] for each in found], [each[3] for each in wanted], atol=1e-5)
    assert all(each["text"] == text[each["start"] : each["end"]] for each in found)


@pytest.mark.anyio
async def test_requests_get_the_entities_of_their_own_labels(oracle: Oracle, folders: Callable[[str], Path]) -> None:
    folder = folders("deberta")
    options: list[dict[str, Any]] = [
        {"threshold": 0.5},
        {"threshold": 0.3, "nested": True},
        {"threshold": 0.6, "multi_label": True},
        {"threshold": 0.2, "nested": True, "multi_label": True},
    ]
    answers: dict[int, Any] = {}
    async with open_engine(CONFIG, plugins=[GlinerEntities.of(folder)]) as engine:

        async def ask(number: int) -> None:
            labels = LABELS[number % 3 :]
            data = {"texts": [*TEXTS, " \n"], "labels": [*labels, labels[0]], **options[number % 4]}
            answers[number] = await engine.process(data)

        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(ask, number)
        one = await engine.process({"text": TEXTS[0], "labels": LABELS})
        nothing = await engine.process({"text": "", "labels": LABELS})
    same(one["entities"], oracle.entities(TEXTS[0], LABELS, 0.5), TEXTS[0])
    assert nothing == {"entities": []}
    counts = set()
    for number, answer in answers.items():
        *found, empty = answer["entities"]
        assert empty == []
        for text, each in zip(TEXTS, found, strict=True):
            wanted = oracle.entities(text, LABELS[number % 3 :], **options[number % 4])
            same(each, wanted, text)
            counts.add(len(wanted))
    assert len(counts) > 4


def test_ways_of_choosing_differ() -> None:
    scores = np.zeros((4, 3, 2), np.float32)
    scores[0, 2, 0], scores[1, 0, 1], scores[2, 1, 0], scores[0, 2, 1] = 0.9, 0.8, 0.7, 0.6

    def found(**options: bool) -> list[tuple[int, int, int]]:
        return [(each.first, each.last, each.label) for each in find_entities(scores, 0.5, **options)]

    assert found() == [(0, 2, 0)]
    assert found(nested=True) == [(0, 2, 0), (1, 1, 1)]
    assert found(multi_label=True) == [(0, 2, 0), (0, 2, 1)]
    assert found(nested=True, multi_label=True) == [(0, 2, 0), (0, 2, 1), (1, 1, 1)]
    assert not find_entities(scores, 0.9)


BAD: list[tuple[Any, str]] = [
    ("text", "data must be an object"),
    ({"labels": ["a"]}, "data must have either text or texts"),
    ({"text": "a", "texts": ["a"], "labels": ["a"]}, "data must have either text or texts"),
    ({"text": 3, "labels": ["a"]}, "data.text must be a text"),
    ({"texts": [], "labels": ["a"]}, "data.texts must have 1 to 256 entries, and has 0"),
    ({"text": "a"}, "data.labels must be a list of texts"),
    ({"text": "a", "labels": ["x"] * 101}, "data.labels must have 1 to 100 entries, and has 101"),
    ({"text": "a", "labels": ["b", " "]}, r"data.labels\[1\] must have 1 to 200 characters"),
    ({"text": "a", "labels": ["b<<ENT>>"]}, r"data.labels\[0\] must not contain <<ENT>> or <<SEP>>"),
    ({"text": "a", "labels": ["b"], "threshold": 2}, "data.threshold must be a number from 0 to 1"),
    ({"text": "a", "labels": ["b"], "nested": 1}, "data.nested must be true or false"),
    ({"text": "a", "labels": ["b"], "flat": True}, "data has the field 'flat'"),
    ({"text": "x" * 20_001, "labels": ["b"]}, "data.text has 20001 characters: at most 20000 are read"),
    (
        {"texts": ["a", "b " * 31], "labels": ["c"]},
        r"data.texts\[1\] has 31 words and marks: the model reads at most 30",
    ),
    ({"text": "żółw" * 4000, "labels": ["c"]}, "tokens: the model reads at most 2048"),
]


@pytest.mark.anyio
async def test_wrong_requests_get_a_clear_error(folders: Callable[[str], Path]) -> None:
    async with open_engine(CONFIG, plugins=[GlinerEntities.of(folders("deberta"))]) as engine:
        for data, says in BAD:
            with pytest.raises(InvalidInput, match=says):
                await engine.process(data)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"span_mode": "token_level"}, "span_mode='token_level' is not supported, only 'markerV0'"),
        ({"subtoken_pooling": "mean"}, "subtoken_pooling='mean' is not supported, only 'first'"),
        ({"words_splitter_type": "spacy"}, "words_splitter_type='spacy'"),
        ({"labels_encoder": "BAAI/bge-small-en"}, "labels_encoder='BAAI/bge-small-en'"),
        ({"fuse_layers": True}, "fuse_layers=True"),
        ({"model_type": "gliner_bi_encoder_span"}, "model_type='gliner_bi_encoder_span'"),
        ({"encoder_config": None}, "encoder_config is missing, so the encoder 'microsoft/deberta-v3-small'"),
        ({"encoder_config": {"model_type": "t5"}}, "model_type='t5' is no encoder alone"),
        ({"max_width": 0}, "max_width=0 must be a whole number of at least 1"),
        ({"class_token_index": 5}, "class_token_index=5, but tokenizer.json has <<ENT>> as"),
        ({"sep_token": "<<END>>"}, "tokenizer.json: <<END>> is missing"),
        ({"num_rnn_layers": 0}, "of another architecture than gliner_config.json describes: .*unread .'rnn"),
        ({"num_rnn_layers": 2}, "missing .'rnn.lstm.bias_hh_l1"),
        ({"hidden_size": 16}, "the weights do not fit gliner_config.json"),
    ],
)
def test_folders_of_other_architectures_are_rejected(
    changes: dict[str, Any], says: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folders("deberta")
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "gliner_config.json").unlink()
    content = json.loads((folder / "gliner_config.json").read_text())
    (tmp_path / "gliner_config.json").write_text(json.dumps({**content, **changes}))
    with pytest.raises(ConfigError, match=says):
        opened(tmp_path)


def opened(folder: Path) -> None:
    settings = read_settings(folder)
    PromptWriter(folder, settings, load_model(folder, settings).max_tokens)


@pytest.mark.parametrize("missing", ["gliner_config.json", "model.safetensors", "tokenizer.json"])
def test_incomplete_and_damaged_folders_are_rejected(
    missing: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    for file in folders("deberta").iterdir():
        if file.name != missing:
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ConfigError, match=missing):
        opened(tmp_path)
    (tmp_path / missing).write_text("no such file")
    with pytest.raises(ConfigError, match=missing):
        opened(tmp_path)


def test_it_is_found_by_its_entry_point_and_its_folder_by_a_variable(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((ROOT / "examples/entities/pyproject.toml").read_text())["project"]
    group = "staged_pool.plugins"
    ((name, value),) = project["entry-points"][group].items()
    found = EntryPoint(name, value, group).load()
    assert found is GlinerEntities
    assert found.name == name

    async def fetch(url: str) -> bytes:
        raise AssertionError(url)

    setup = PluginSetup(config=CONFIG, card=None, fetch=fetch)
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="GLINER_MODEL is not set"):
        found(setup)
    monkeypatch.setenv(VARIABLE, str(folders("deberta")))
    found(setup)
