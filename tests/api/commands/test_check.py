"""`staged-pool check`: a report on a model folder without serving it."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from staged_pool.api.commands.check_view import render_card
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import Output
from tests.models.tiny import build, edit_json, rerankers, write_json
from tests.servers.in_process import invoke_command
from tests.servers.process import COMMAND, run_command
from tests.support.cards import CARD, CLASSIFIER, TAGGER


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


def test_a_terminal_gets_a_report(folder: Path) -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "120", "TERM": "xterm"}
    done = subprocess.run(
        [*COMMAND, "check", "--offline", str(folder), "--dtype", "float32"],
        stdout=theirs, stderr=subprocess.PIPE, timeout=600, env=environment, check=False,
    )  # fmt: skip
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        text = terminal.read(65536).decode()
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=2) for line in text.splitlines()]
    assert {line[0] for line in lines} == {"ok"}
    facts = {line[1]: line[2].strip() for line in lines}
    assert facts["model"] == "nomic, NomicBertModel, 0.1 million parameters"
    assert facts["vectors"] == "32 numbers, which may be cut to 8, 16, 24, 32; of length 1, pooling mean"
    assert facts["prompts"].startswith("query 'search_query: ', document 'search_document: '")
    assert facts["memory"].endswith(" GB left")


def reported(card: ModelCard) -> dict[str, str]:
    """Return the lines of a report by mark and subject."""
    console = Console(file=io.StringIO(), width=200)
    console.print(render_card(card, 10**9, 2 * 10**9))
    assert isinstance(console.file, io.StringIO)
    parts = [line.split(maxsplit=2) for line in console.file.getvalue().splitlines()]
    return {f"{mark} {name}": text.strip() for mark, name, text in parts}


def test_a_report_has_a_line_for_each_output_and_each_assumption() -> None:
    labels = tuple(f"label-{number}" for number in range(12))
    told = reported(replace(CLASSIFIER, labels=labels, notes=("the pooling is assumed", "so is the prompt")))
    assert told["ok labels"] == "12: label-0, label-1, label-2, label-3, label-4, label-5, label-6, label-7, ..."
    assert told["!! assumed"] == "so is the prompt"
    assert reported(TAGGER)["ok labels"] == "2 for each token: O, CAPITAL"
    every = reported(replace(CARD, outputs=(Output.SPARSE, Output.TOKEN_WEIGHTS, Output.MULTI_VECTOR), token_width=7))
    assert every["ok weights"] == "one for each token"
    assert every["ok tokens"] == "a vector of 7 numbers for each token"
    assert "vocabulary entries" in every["ok sparse"]
    assert reported(replace(CARD, splits_long_inputs=True))["ok inputs"].endswith("longer ones are split")
    assert reported(CARD)["ok memory"] == "1.0 GB used with the model, 2.0 GB left"


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
