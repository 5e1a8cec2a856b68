"""The command `run-batch`: its flags, its messages and its ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from blockbuster import BlockBuster

from staged_pool.api.bulk.batch_lines import BatchAnswer, BatchAnswers, BatchLine
from staged_pool.api.bulk.files import journal_of, part_of
from staged_pool.api.bulk.job import Window
from staged_pool.api.bulk.opening import TEXT_WINDOW, text_window
from staged_pool.api.bulk.parts import Work
from staged_pool.api.bulk.text_work import TextCall
from staged_pool.api.commands.batch_flags import Batch
from staged_pool.api.commands.batch_run import Outcome, run_batch
from staged_pool.api.commands.batch_sides import EngineSide, Side
from staged_pool.api.commands.run_batch import EXIT_LINES_FAILED
from staged_pool.api.commands.run_batch import run_batch as run_batch_command
from staged_pool.runtime.requests import HYPOTHESIS
from staged_pool.runtime.results import ClassifyResult, EmbedResult
from staged_pool.stages.errors import ConfigError, EngineStopped
from tests.api.bulk.jobs import line_of, read_now, request
from tests.models.heads.test_zero_shot import expected as zero_shot
from tests.models.tiny import build
from tests.runtime.test_zero_shot import NLI
from tests.servers.engines import engine_on
from tests.servers.in_process import invoke_command
from tests.servers.on_socket import serving
from tests.servers.preloaded import ROOT
from tests.servers.tiny_models import tiny
from tests.support.model import LetterModel

pytestmark = pytest.mark.usefixtures("files_are_read_here")

TEXTS = ("one", "two words", "three more words")
LABELS = ("food", "a program", "music")


@pytest.fixture
def files_are_read_here(nothing_blocks_the_event_loop: BlockBuster) -> None:
    """Allow blocking calls around the event loop, such as imports and files of the test."""
    nothing_blocks_the_event_loop.deactivate()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with a file of texts."""
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    return tmp_path


@pytest.fixture(scope="module")
def nli_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model of natural language inference."""
    return build("ce-nli-3label", tmp_path_factory.mktemp("models") / "nli")


def run(folder: Path, model: Path | None, *flags: str, source: str = "in.txt") -> subprocess.CompletedProcess[str]:
    """Run the command on files of a folder; flags that name none say so by `=`."""
    at = [f"{folder}/{flag}" if flag.startswith(("out", "wrong")) else flag for flag in flags]
    chosen = () if model is None else ("--model", str(model), "--dtype", "float32", "--tune", "off")
    return invoke_command("run-batch", "-i", str(folder / source), *at, *chosen)


def embedded(model: Path, *flags: str) -> list[list[float]]:
    """Return the vectors of the texts by the command `embed`."""
    done = invoke_command("embed", "--model", str(model), "--dtype", "float32", *flags, *TEXTS)
    return [json.loads(line)["embedding"] for line in done.stdout.splitlines()]


def test_texts_become_rows_of_numpy(texts: Path, tiny_folder: Path) -> None:
    done = run(texts, tiny_folder, "-o", "out.npy")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(f"3 lines done and 0 failed, written to {texts}/out.npy: ")
    assert done.stderr.endswith(" lines/s\n")
    assert np.load(texts / "out.npy") == pytest.approx(np.array(embedded(tiny_folder)), abs=1e-5)


def test_texts_become_lines_of_json_or_parquet_by_the_name_or_the_flag(texts: Path, tiny_folder: Path) -> None:
    for flags in (["-o", "out.jsonl"], ["-o", "out.parquet"], ["-o", "out.bin", "--format", "parquet"]):
        assert run(texts, tiny_folder, *flags, "--matryoshka", "--dimensions", "3").returncode == 0
    vectors = np.array(embedded(tiny_folder, "--matryoshka", "--dimensions", "3"))
    lines = sorted(read_now(texts / "out.jsonl"), key=lambda line: int(line["index"]))
    assert np.array([line["embedding"] for line in lines]) == pytest.approx(vectors, abs=1e-5)
    for name in ("out.parquet", "out.bin"):
        rows = pq.read_table(texts / name).to_pydict()["embedding"]
        assert np.array(rows) == pytest.approx(vectors, abs=1e-5)


def test_texts_of_a_column_are_classified(tmp_path: Path) -> None:
    model = build("seqcls-multiclass", tmp_path / "classifier")
    pq.write_table(pa.table({"id": ["a", "b", "c"], "body": TEXTS}), tmp_path / "in.parquet")
    done = run(tmp_path, model, "-o", "out.parquet", "--task", "classify", "--column", "body", source="in.parquet")
    assert done.returncode == 0
    labelled = invoke_command("classify", "--model", str(model), "--dtype", "float32", *TEXTS)
    expected = [json.loads(line) for line in labelled.stdout.splitlines()]
    found = pq.read_table(tmp_path / "out.parquet").to_pydict()
    assert found["label"] == [each["label"] for each in expected]
    assert np.array(found["probs"]) == pytest.approx(np.array([each["probs"] for each in expected]), abs=1e-5)


def test_texts_get_the_scores_of_candidate_labels(texts: Path, nli_folder: Path) -> None:
    asked = ("--task", "classify", "--candidate-labels", "food, a program,music")
    own = ("--multi-label", "--hypothesis-template", "Of {}.")
    outcomes = [run(texts, nli_folder, "-o", name, *asked) for name in ("out.jsonl", "out.parquet")]
    outcomes += [run(texts, nli_folder, "-o", name, *asked, *own) for name in ("out.npy", "out.ndjson")]
    assert [done.returncode for done in outcomes] == [0] * 4
    wanted = zero_shot(nli_folder, TEXTS, LABELS)
    lines = sorted(read_now(texts / "out.jsonl"), key=lambda line: int(line["index"]))
    columns = pq.read_table(texts / "out.parquet").to_pydict()
    assert [line["label"] for line in lines] == columns["label"] == [LABELS[place] for place in wanted.argmax(axis=1)]
    for probs in ([line["probs"] for line in lines], columns["probs"]):
        assert np.array(probs) == pytest.approx(wanted, abs=1e-5)
    apart = zero_shot(nli_folder, TEXTS, LABELS, multi_label=True, hypothesis_template="Of {}.")
    assert np.load(texts / "out.npy") == pytest.approx(apart, abs=1e-5)
    lines = sorted(read_now(texts / "out.ndjson"), key=lambda line: int(line["index"]))
    assert np.array([line["probs"] for line in lines]) == pytest.approx(apart, abs=1e-5)


def test_a_flag_that_does_not_fit_the_model_ends_the_job_before_any_text(texts: Path, tiny_folder: Path) -> None:
    labels = ("--task", "classify", "--candidate-labels", "food")
    for flags, message in ((labels, "cannot choose among candidate labels"), (("--prompt-name", "no"), "prompt_name")):
        done = run(texts, tiny_folder, "-o", "out.npy", *flags)
        assert done.returncode == 2
        assert message in done.stderr
        assert "--resume" not in done.stderr
    assert sorted(path.name for path in texts.iterdir()) == ["in.txt"]


def test_lines_that_fail_have_their_own_file_and_exit_code(tmp_path: Path, tiny_folder: Path) -> None:
    lines = [request("right"), request("wrong", model="none"), "not json"]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(map(line_of, lines)))
    done = run(tmp_path, tiny_folder, "-o", "out.jsonl", "--errors", "wrong.jsonl", source="in.jsonl")
    assert done.returncode == EXIT_LINES_FAILED
    assert done.stderr.startswith("1 lines done and 2 failed")
    assert [line["custom_id"] for line in read_now(tmp_path / "out.jsonl")] == ["right"]
    assert {line["custom_id"] for line in read_now(tmp_path / "wrong.jsonl")} == {"wrong", None}


def test_texts_that_are_too_long_fail_or_are_cut(tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "in.txt").write_text("word " * 3000)
    assert run(tmp_path, tiny_folder, "-o", "out.npy").returncode == EXIT_LINES_FAILED
    (error,) = read_now(tmp_path / "out.npy.errors.jsonl")
    assert error["error"]["code"] == 400
    assert run(tmp_path, tiny_folder, "-o", "out.npy", "--truncate", "--overwrite").returncode == 0
    assert not (tmp_path / "out.npy.errors.jsonl").exists()


def test_a_server_answers_instead_of_a_model_here(texts: Path, tiny_folder: Path, nli_folder: Path) -> None:
    (texts / "in.jsonl").write_bytes(line_of(request("1", TEXTS[0])))
    with anyio.from_thread.start_blocking_portal() as portal:
        models = (tiny(tiny_folder, tune="off"), tiny(nli_folder, tune="off"))
        serves = serving(*models, api_keys=("secret",))
        with portal.wrap_async_context_manager(serves) as server:
            url = ("--url", f"http://127.0.0.1:{server.port}", "--api-key", "secret")
            done = run(texts, None, "-o", "out.npy", *url)
            requests = run(texts, None, "-o", "out.jsonl", *url, source="in.jsonl")
            labels = ("--task", "classify", "--candidate-labels", ",".join(LABELS), "--multi-label")
            labelled = run(texts, None, "-o", "out-labels.npy", *url, *labels)
    assert (done.returncode, requests.returncode, labelled.returncode) == (0, 0, 0)
    scores = zero_shot(nli_folder, TEXTS, LABELS, multi_label=True)
    assert np.load(texts / "out-labels.npy") == pytest.approx(scores, abs=1e-5)
    vectors = np.array(embedded(tiny_folder))
    assert np.load(texts / "out.npy") == pytest.approx(vectors, abs=1e-5)
    (line,) = read_now(texts / "out.jsonl")
    assert line["response"]["body"]["data"][0]["embedding"] == pytest.approx(vectors[0].tolist(), abs=1e-5)


def test_a_server_that_is_not_there_is_an_error_that_says_how_to_go_on(texts: Path, free_tcp_port: int) -> None:
    done = run(texts, None, "-o", "out.npy", "--url", f"http://127.0.0.1:{free_tcp_port}")
    assert done.returncode == 1
    assert done.stderr.startswith("error: The server cannot be reached")
    assert done.stderr.endswith("run the same command with --resume to go on\n")
    assert sorted(path.name for path in texts.iterdir()) == ["in.txt"]


def test_what_is_there_is_only_overwritten_if_that_is_asked_for(texts: Path, tiny_folder: Path) -> None:
    (texts / "out.npy").write_text("precious")
    done = run(texts, tiny_folder, "-o", "out.npy")
    assert done.returncode == 2
    assert "out.npy: the file exists; name another one, or overwrite it" in done.stderr
    done = run(texts, tiny_folder, "-o", "out.npy", "--resume")
    assert (done.returncode, done.stderr) == (0, f"{texts}/out.npy is complete: there is nothing to resume\n")
    assert run(texts, tiny_folder, "-o", "out.npy", "--overwrite").returncode == 0
    assert np.load(texts / "out.npy").shape[0] == 3


def test_a_complete_output_is_not_resumed_with_an_input_that_was_changed_later(texts: Path, tiny_folder: Path) -> None:
    assert run(texts, tiny_folder, "-o", "out.npy").returncode == 0
    assert run(texts, tiny_folder, "-o", "out.npy", "--resume").returncode == 0
    finished_ns = (texts / "out.npy").stat().st_mtime_ns
    (texts / "in.txt").write_text("another text\n")
    os.utime(texts / "in.txt", ns=(finished_ns + 1, finished_ns + 1))
    done = run(texts, tiny_folder, "-o", "out.npy", "--resume")
    assert done.returncode == 2
    assert "in.txt: it was changed after" in done.stderr
    assert "overwrite the output, or name another one" in done.stderr
    (texts / "in.txt").unlink()
    assert run(texts, tiny_folder, "-o", "out.npy", "--resume").returncode == 0, "nothing says that it was another one"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resume", "--overwrite"], "--resume goes on with a job, and --overwrite begins anew; give one of them"),
        (["--column", "text"], "--column: only an input in Parquet has columns"),
        (["--input-format", "batch"], "--format 'npy': lines that are requests give lines of JSON"),
        (["--input-format", "batch", "--format", "jsonl", "--truncate"], "--truncate: a line that is a request says"),
        (["--task", "classify", "--dimensions", "3"], "--dimensions: only vectors have it"),
        (["--input-format", "batch", "--format", "jsonl", "--task", "classify"], "--task 'classify': a line that is"),
        (["--candidate-labels", "a"], "--candidate-labels: only labels have it; write --task classify, too"),
        (["--task", "classify", "--multi-label"], "--multi-label: is for --candidate-labels, which are missing"),
        (["--task", "classify", "--candidate-labels", ","], "--candidate-labels: candidate_labels has no label"),
        (
            ["--task", "classify", "--candidate-labels", "a,b", "--hypothesis-template", "so"],
            "--hypothesis-template: hypothesis_template must have {} exactly once",
        ),
        (
            ["--input-format", "batch", "--format", "jsonl", "--candidate-labels", "a"],
            "--candidate-labels: a line that is a request says this in its body",
        ),
        (["--errors", "out.npy"], "it is the output; without the flag, errors go there"),
        (["--model", "/nope"], "there is no such folder"),
        (["--dtype", "float16"], "--dtype 'float16': is for GPUs"),
        (["--url", "nowhere"], "base_url: must be an http or https address"),
    ],
)
def test_flags_that_do_not_fit_are_errors(texts: Path, flags: Sequence[str], message: str) -> None:
    done = run(texts, None, "-o", "out.npy", *flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert sorted(path.name for path in texts.iterdir()) == ["in.txt"]


def test_the_input_is_never_overwritten(texts: Path, tiny_folder: Path) -> None:
    done = invoke_command("run-batch", "-i", str(texts / "in.txt"), "-o", str(texts / "in.txt"), "--overwrite")
    assert done.returncode == 2
    assert "it would be overwritten by the output" in done.stderr


def test_an_input_that_is_missing_is_an_error(tmp_path: Path, tiny_folder: Path) -> None:
    done = run(tmp_path, tiny_folder, "-o", "out.npy")
    assert done.returncode == 2
    assert "in.txt: the input cannot be read: No such file" in done.stderr


def test_a_signal_stops_it_in_order_and_it_goes_on(tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(f"text {number}\n" for number in range(20_000)))
    output = tmp_path / "out.npy"
    command = [sys.executable, "-m", "staged_pool", "run-batch", "-i", str(tmp_path / "in.txt"), "-o", str(output)]
    command += ["--model", str(tiny_folder), "--dtype", "float32", "--tune", "off"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        until = time.monotonic() + 120
        while not (part_of(output).exists() and part_of(output).stat().st_size > 100_000):
            assert process.poll() is None
            assert time.monotonic() < until, "the job does not begin"
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "stopping: the lines in work are finished first" in errors
    assert errors.endswith("stopped by SIGTERM: run the same command with --resume to go on\n")
    done = invoke_command(*command[3:], "--resume")
    assert done.returncode == 0
    assert " by earlier runs), written to" in done.stderr
    assert np.isfinite(np.load(output)).all()
    assert not journal_of(output).exists()


def batch_of(folder: Path, **flags: Any) -> Batch:
    """Return the job of `in.txt` in a folder, by the flags of the command."""
    command = ["-i", str(folder / "in.txt"), "-o", str(folder / "out.jsonl")]
    given = run_batch_command.make_context("run-batch", command).params
    return Batch.of({**given, **flags}, None)


class Endless(Side):
    """Side whose second group of texts sends signals, and never ends."""

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._signals = signals

    def batch_work(self, answers: BatchAnswers) -> Work[BatchLine, BatchAnswer]:
        raise NotImplementedError

    def text_call(self, batch: Batch) -> TextCall:
        return self._embed

    async def _embed(self, texts: Sequence[str]) -> EmbedResult:
        if "second" in texts:
            for number in self._signals:
                signal.raise_signal(number)
                await anyio.wait_all_tasks_blocked()
            await anyio.sleep_forever()
        return EmbedResult(dense=np.ones((len(texts), 1), np.float32), usage=None, model="")  # type: ignore[arg-type]

    def window(self, whole: Window) -> Window:
        return Window(lines=2)


@pytest.mark.anyio
async def test_a_second_signal_drops_the_lines_in_work(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("first\nsecond\nthird\n")
    batch = batch_of(tmp_path)

    @asynccontextmanager
    async def side() -> AsyncIterator[Side]:
        yield Endless([signal.SIGINT, signal.SIGTERM])

    outcome = Outcome()
    with anyio.fail_after(30):
        await run_batch(batch, side(), lambda progress: None, outcome)
    assert (outcome.summary, outcome.signal) == (None, signal.SIGTERM)
    assert [line["index"] for line in read_now(part_of(batch.output))] == [0]
    assert journal_of(batch.output).exists()


class Stopping(EngineSide):
    """Side of an engine that stops behind the first text."""

    def text_call(self, batch: Batch) -> TextCall:
        call = super().text_call(batch)

        async def once(texts: Sequence[str]) -> EmbedResult | ClassifyResult:
            if "first" not in texts:
                raise EngineStopped("The engine stops.")
            return await call(texts)

        return once

    def window(self, whole: Window) -> Window:
        return Window(lines=1)


@pytest.mark.anyio
async def test_a_job_is_resumed_with_the_same_labels_alone(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("first\nacc\nbac\n")
    labels = {"task": "classify", "candidate_labels": "c, acca", "hypothesis_template": "={}", "multi_label": True}

    async def answered(side: type[EngineSide], **flags: Any) -> Outcome:
        @asynccontextmanager
        async def on_engine() -> AsyncIterator[Side]:
            yield side(engine, auto_truncate=True)

        outcome = Outcome()
        await run_batch(batch_of(tmp_path, **labels | flags), on_engine(), lambda progress: None, outcome)
        return outcome

    async with engine_on(LetterModel(NLI)) as engine:
        with pytest.raises(EngineStopped):
            await answered(Stopping)
        others: dict[str, dict[str, Any]] = {
            "candidate_labels was ['c', 'acca'] and is ['c']": {"candidate_labels": "c"},
            "candidate_labels was ['c', 'acca'] and is ['acca', 'c']": {"candidate_labels": "acca,c"},
            "multi_label was True and is False": {"multi_label": False},
            "hypothesis_template was '={}' and is 'so {}'": {"hypothesis_template": "so {}"},
            "candidate_labels was ['c', 'acca'] and is None": {
                "candidate_labels": None, "hypothesis_template": HYPOTHESIS, "multi_label": False,
            },
        }  # fmt: skip
        for message, flags in others.items():
            with pytest.raises(ConfigError, match=f"it belongs to another job: {re.escape(message)}"):
                await answered(EngineSide, resume=True, **flags)
        outcome = await answered(EngineSide, resume=True)
        wanted = await engine.classify(
            ["first", "acc", "bac"], candidate_labels=["c", "acca"], hypothesis_template="={}", multi_label=True
        )
    assert outcome.summary is not None
    assert (outcome.summary.resumed, outcome.summary.completed) == (1, 3)
    probs = {line["index"]: line["probs"] for line in read_now(tmp_path / "out.jsonl")}
    assert np.array([probs[index] for index in range(3)]) == pytest.approx(wanted.scores)


def test_texts_with_many_labels_share_requests_of_as_many_items() -> None:
    for labels, lines, group in ((1, 2048, 64), (3, 682, 21), (64, 32, 1), (5000, 1, 1)):
        window = text_window(labels)
        assert (window.lines, window.group_lines) == (lines, group)
        assert (window.size, window.group_size) == (TEXT_WINDOW.size, TEXT_WINDOW.group_size)
