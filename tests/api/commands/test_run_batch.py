"""The command `run-batch`: its flags, its messages and its ends."""

from __future__ import annotations

import json
import os
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
from staged_pool.api.bulk.parts import Work
from staged_pool.api.bulk.text_work import TextCall
from staged_pool.api.commands.batch_flags import Batch
from staged_pool.api.commands.batch_run import Outcome, run_batch
from staged_pool.api.commands.batch_sides import Side
from staged_pool.api.commands.run_batch import EXIT_LINES_FAILED
from staged_pool.runtime.results import EmbedResult
from tests.api.bulk.jobs import line_of, read_now, request
from tests.models.tiny import build
from tests.servers.in_process import invoke_command
from tests.servers.on_socket import serving
from tests.servers.preloaded import ROOT
from tests.servers.tiny_models import tiny

pytestmark = pytest.mark.usefixtures("files_are_read_here")

TEXTS = ("one", "two words", "three more words")


@pytest.fixture
def files_are_read_here(nothing_blocks_the_event_loop: BlockBuster) -> None:
    """Allow blocking calls around the event loop, such as imports and files of the test."""
    nothing_blocks_the_event_loop.deactivate()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with a file of texts."""
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    return tmp_path


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


def test_a_server_answers_instead_of_a_model_here(texts: Path, tiny_folder: Path) -> None:
    (texts / "in.jsonl").write_bytes(line_of(request("1", TEXTS[0])))
    with anyio.from_thread.start_blocking_portal() as portal:
        serves = serving(tiny(tiny_folder, tune="off"), api_keys=("secret",))
        with portal.wrap_async_context_manager(serves) as server:
            url = ("--url", f"http://127.0.0.1:{server.port}", "--api-key", "secret")
            done = run(texts, None, "-o", "out.npy", *url)
            requests = run(texts, None, "-o", "out.jsonl", *url, source="in.jsonl")
    assert (done.returncode, requests.returncode) == (0, 0)
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resume", "--overwrite"], "--resume goes on with a job, and --overwrite begins anew; give one of them"),
        (["--column", "text"], "--column: only an input in Parquet has columns"),
        (["--input-format", "batch"], "--format 'npy': lines that are requests give lines of JSON"),
        (["--input-format", "batch", "--format", "jsonl", "--truncate"], "--truncate: a line that is a request says"),
        (["--task", "classify", "--dimensions", "3"], "--dimensions: only vectors have it"),
        (["--input-format", "batch", "--format", "jsonl", "--task", "classify"], "--task 'classify': a line that is"),
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
    given: dict[str, Any] = dict.fromkeys(("errors", "column", "dimensions", "prompt_name", "url", "api_key", "model"))
    batch = Batch(
        source=tmp_path / "in.txt",
        output=tmp_path / "out.jsonl",
        source_format="text",
        output_format="jsonl",
        existing="reject",
        task="auto",
        truncate=False,
        concurrency=1,
        **given,
    )

    @asynccontextmanager
    async def side() -> AsyncIterator[Side]:
        yield Endless([signal.SIGINT, signal.SIGTERM])

    outcome = Outcome()
    with anyio.fail_after(30):
        await run_batch(batch, side(), lambda progress: None, outcome)
    assert (outcome.summary, outcome.signal) == (None, signal.SIGTERM)
    assert [line["index"] for line in read_now(part_of(batch.output))] == [0]
    assert journal_of(batch.output).exists()
