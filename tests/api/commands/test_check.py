"""`staged-pool check`: a report on a model folder without serving it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.models.tiny import build, edit_json, rerankers, write_json
from tests.servers.in_process import invoke_command
from tests.servers.process import run_command


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """These tests have no event loop of their own, and import models."""


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return invoke_command("check", "--offline", *arguments)


def told(stderr: str) -> list[str]:
    """Return lines of standard error, but for the one about a busy machine."""
    return [line for line in stderr.splitlines() if '"model.not_measured"' not in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("nomic-matryoshka", tmp_path_factory.mktemp("check") / "nomic")


def test_the_card_is_printed_as_one_object(folder: Path) -> None:
    done = run_command("check", "--offline", str(folder), "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    card = json.loads(done.stdout)
    assert (card["name"], card["architecture"], card["dtype"]) == ("nomic", "NomicBertModel", "float32")
    assert (card["pooling"], card["normalize"], card["max_tokens"]) == ("mean", True, 96)
    assert card["outputs"][0] == "dense"
    assert card["dimensions"] == [8, 16, 24, 32]
    assert card["prompts"]["query"] == "search_query: "
    assert told(done.stderr) == []


@pytest.mark.parametrize(
    ("kind", "lanes", "outputs"),
    [
        ("clip", ["text", "image"], ["dense"]),
        ("vit-labels", ["image"], ["labels"]),
        ("colpali", ["text", "image"], ["multi_vector"]),
    ],
)
def test_models_of_images_are_understood(kind: str, lanes: list[str], outputs: list[str], tmp_path: Path) -> None:
    done = check(str(build(kind, tmp_path / kind)))
    assert done.returncode == 0, done.stderr
    card = json.loads(done.stdout)
    assert (card["lanes"], card["outputs"]) == (lanes, outputs)
    assert told(done.stderr) == []


def test_a_folder_of_images_that_do_not_fit_its_model_is_rejected_in_one_line(tmp_path: Path) -> None:
    wrong = build("vit-labels", tmp_path / "wrong")
    edit_json(wrong / "preprocessor_config.json", size={"height": 64, "width": 80})
    done = check(str(wrong))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the image processor makes images of 80 x 64 pixels")
    assert done.stderr.count("\n") == 1


def test_a_folder_that_cannot_be_served_is_rejected_in_one_line(folder: Path, tmp_path: Path) -> None:
    wrong = shutil.copytree(folder, tmp_path / "wrong")
    write_json(wrong / "1_Pooling" / "config.json", {"pooling_mode": "attention"})
    done = check(str(wrong))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: 1_Pooling/config.json: pooling_mode='attention' is not known, only cls")
    assert done.stderr.count("\n") == 1


def test_what_was_assumed_of_a_reranker_is_printed(tmp_path: Path) -> None:
    done = check(str(rerankers.qwen2(tmp_path / "mxbai-rerank-base-v2")), "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    card = json.loads(done.stdout)
    assert (card["scoring"], card["outputs"]) == ("cross-encoder", ["labels"])
    assert card["notes"][0].startswith("read as mxbai-rerank-v2, as its name alone says; score: the logit of 1")


def test_a_language_model_of_which_nothing_is_known_names_the_ways_out_that_work(tmp_path: Path) -> None:
    folder = str(rerankers.llama(tmp_path / "model"))
    done = check(folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("error: config.json: LlamaForCausalLM is a language model")
    assert all(flag in done.stderr for flag in ("--task embed", "--task score", "--score-template", "--score-tokens"))
    embedded = invoke_command("embed", "--offline", "--model", folder, "--task", "embed", "a text")
    assert len(json.loads(embedded.stdout)["embedding"]) == 32
    scored = check(folder, "--score-template", "{query} {document}", "--score-tokens", "yes,no", "--dtype", "float32")
    assert json.loads(scored.stdout)["activation"] == "sigmoid"
