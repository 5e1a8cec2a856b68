"""Texts of files: each gets its row, many share a request, and a wrong one fails alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from staged_pool.api.bulk import text_file
from staged_pool.api.bulk.job import Summary, Window
from staged_pool.api.bulk.opening import TEXT_WINDOW, TextFormats, job_files, open_texts
from staged_pool.api.bulk.parquet import ParquetReader
from staged_pool.api.bulk.text_file import LineReader
from staged_pool.api.bulk.text_work import TextWork
from staged_pool.api.bulk.texts import TextLine, read_text_line
from staged_pool.runtime.results import ClassifyResult, EmbedResult
from staged_pool.stages.errors import ConfigError, InvalidInput, Unsupported
from tests.api.bulk.jobs import read_now
from tests.servers.engines import engine_on
from tests.support.cards import CARD, CLASSIFIER, LABELS
from tests.support.model import LetterModel, expected

CUT_BYTES = 100
OUTPUTS: Mapping[str, Literal["jsonl", "npy", "parquet"]] = {".jsonl": "jsonl", ".npy": "npy", ".parquet": "parquet"}


def lines_of(path: Path) -> list[TextLine]:
    """Read all lines of a file of texts."""
    reader = LineReader(path, read_text_line, skip_blank=False)
    lines: list[TextLine] = []
    while some := reader.read():
        lines += some
    assert reader.read_share == 1.0
    reader.close()
    return lines


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"", []),
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\n\r\ntwo", ["one", "", "two"]),
        (b"\xef\xbb\xbfone\n", ["one"]),
        ("grün\n山".encode(), ["grün", "山"]),
        (b"\n\n", ["", ""]),
    ],
)
def test_each_line_is_a_text(tmp_path: Path, content: bytes, texts: list[str]) -> None:
    (tmp_path / "in.txt").write_bytes(content)
    lines = lines_of(tmp_path / "in.txt")
    assert [line.text for line in lines] == texts
    assert [line.number for line in lines] == list(range(len(texts)))
    assert not any(line.fault for line in lines)


def test_lines_that_are_no_texts_have_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_file, "MAX_LINE_BYTES", CUT_BYTES)
    monkeypatch.setattr(text_file, "READ_BYTES", 16)
    long, longest = b"x" * CUT_BYTES, b"x" * (CUT_BYTES + 1)
    (tmp_path / "in.txt").write_bytes(b"\n".join([b"ok \xff", long, longest, b"next", longest * 3]))
    lines = lines_of(tmp_path / "in.txt")
    assert [line.fault for line in lines] == [
        "The text cannot be read: it is not UTF-8, from byte 4 of line 1 on",
        "",
        "The line has more than 100 bytes; split it into several",
        "",
        "The line has more than 100 bytes; split it into several",
    ]
    assert [line.text for line in lines][1:4] == [long.decode(), "", "next"]


def table(path: Path, **columns: Sequence[Any]) -> Path:
    """Write a file of Parquet."""
    pq.write_table(pa.table(columns), path, row_group_size=700)
    return path


def test_parquet_gives_the_texts_of_a_column(tmp_path: Path) -> None:
    texts = [None if number == 1500 else f"text {number}" for number in range(2500)]
    path = table(tmp_path / "in.parquet", number=range(2500), body=texts)
    reader = ParquetReader(path, None)
    lines: list[TextLine] = []
    while some := reader.read():
        lines += some
    assert reader.read_share == 1.0
    reader.close()
    assert [line.number for line in lines] == list(range(2500))
    assert [line.text or None for line in lines] == texts
    assert [line.fault for line in lines if line.fault] == ["The text is null"]


def test_a_text_of_parquet_that_is_not_utf_8_fails_alone(tmp_path: Path) -> None:
    texts = [b"one", b"a\xff", None, "grün".encode()]
    for kind, stored in ((pa.string(), pa.binary()), (pa.large_string(), pa.large_binary())):
        column = pa.Array.from_buffers(kind, len(texts), pa.array(texts, stored).buffers())
        pq.write_table(pa.table({"text": column}), tmp_path / "in.parquet")
        reader = ParquetReader(tmp_path / "in.parquet", None)
        lines = reader.read()
        reader.close()
        assert [line.text for line in lines] == ["one", "", "", "grün"]
        message = "The text cannot be read: it is not UTF-8, from byte 2 of line 1 on"
        assert [line.fault for line in lines] == ["", message, "The text is null", ""]


def test_the_column_of_texts_must_be_clear(tmp_path: Path) -> None:
    path = table(tmp_path / "in.parquet", title=["a"], body=["b"], number=[1])
    with pytest.raises(ConfigError, match="name the column of the texts; columns of texts: title, body"):
        ParquetReader(path, None)
    with pytest.raises(ConfigError, match="there is no column 'number' of texts; columns of texts: title, body"):
        ParquetReader(path, "number")
    reader = ParquetReader(path, "body")
    assert [line.text for line in reader.read()] == ["b"]
    reader.close()
    reader = ParquetReader(table(tmp_path / "two.parquet", title=["a"], text=["b"]), None)
    assert [line.text for line in reader.read()] == ["b"]
    reader.close()
    (tmp_path / "no.parquet").write_text("text")
    with pytest.raises(ConfigError, match="it is no file of Parquet"):
        ParquetReader(tmp_path / "no.parquet", None)


async def run(folder: Path, work: TextWork, output: str, window: Window = TEXT_WINDOW) -> Summary:
    """Run the job of texts in a folder."""
    formats = TextFormats("text", OUTPUTS[Path(output).suffix])
    opening = partial(
        open_texts,
        source=folder / "in.txt",
        output=folder / output,
        errors=None,
        formats=formats,
        identity={},
        existing="reject",
    )
    async with job_files(opening) as job:
        return await job.run(work, window=window, report=lambda progress: None)


TEXTS = ["one", "x" * 1000, "two", "NaN", "", "three"]
WRONG = {1: "too many tokens", 3: "NaN", 4: "no tokens"}


def write_texts(path: Path, texts: Sequence[str]) -> None:
    path.write_text("".join(f"{text}\n" for text in texts))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with a file of texts, three of which are wrong."""
    write_texts(tmp_path / "in.txt", TEXTS)
    return tmp_path


@pytest.mark.anyio
@pytest.mark.parametrize("group_lines", [1, 2, 64])
async def test_a_wrong_text_fails_alone(texts: Path, group_lines: int, nothing_blocks_the_event_loop: Any) -> None:
    async with engine_on(LetterModel()) as engine:
        work = TextWork(engine.embed)
        summary = await run(texts, work, "out.npy", window=Window(group_lines=group_lines))
    nothing_blocks_the_event_loop.deactivate()
    rows = np.load(texts / "out.npy")
    assert (summary.completed, summary.failed) == (3, 3)
    for number, text in enumerate(TEXTS):
        if number in WRONG:
            assert np.isnan(rows[number]).all()
        else:
            assert rows[number].tolist() == expected(text).tolist()
    errors = {line["index"]: line["error"]["message"] for line in read_now(texts / "out.npy.errors.jsonl")}
    assert errors.keys() == WRONG.keys()
    assert all(why in errors[number] for number, why in WRONG.items())


@pytest.mark.anyio
async def test_many_texts_share_a_request(tmp_path: Path, nothing_blocks_the_event_loop: Any) -> None:
    asked: list[int] = []
    nothing_blocks_the_event_loop.deactivate()
    write_texts(tmp_path / "in.txt", [f"text {number}" for number in range(1000)])
    async with engine_on(LetterModel()) as engine:

        async def call(some: Sequence[str]) -> EmbedResult:
            asked.append(len(some))
            return await engine.embed(some)

        await run(tmp_path, TextWork(call), "out.jsonl")
    assert len(asked) == -(-1000 // TEXT_WINDOW.group_lines)
    lines = read_now(tmp_path / "out.jsonl")
    assert {line["index"]: line["embedding"] for line in lines} == {
        number: expected(f"text {number}").tolist() for number in range(1000)
    }


@pytest.mark.anyio
@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet", "out.npy"])
async def test_texts_are_classified(texts: Path, output: str, nothing_blocks_the_event_loop: Any) -> None:
    nothing_blocks_the_event_loop.deactivate()
    write_texts(texts / "in.txt", ["aab", "", "cc"])
    async with engine_on(LetterModel(CLASSIFIER)) as engine:
        summary = await run(texts, TextWork(engine.classify), output)
        scores = (await engine.classify(["aab", "cc"])).scores
    assert (summary.completed, summary.failed) == (2, 1)
    match output:
        case "out.jsonl":
            lines = {line["index"]: line for line in read_now(texts / output)}
            assert (lines[0]["label"], lines[2]["label"]) == (LABELS[0], LABELS[2])
            assert lines[0]["probs"] == pytest.approx(scores[0].tolist())
            assert lines[1]["error"]["code"] == 400
        case "out.parquet":
            columns = pq.read_table(texts / output).to_pydict()
            assert columns["label"] == [LABELS[0], None, LABELS[2]]
            assert columns["probs"][2] == pytest.approx(scores[1].tolist())
        case _:
            assert np.load(texts / output).shape == (3, len(LABELS))


@pytest.mark.anyio
async def test_errors_that_name_no_text_are_found_by_halves() -> None:
    async def call(some: Sequence[str]) -> ClassifyResult:
        if "wrong" in some:
            raise InvalidInput("one of them")
        return ClassifyResult(scores=np.zeros((len(some), 1), np.float32), labels=(), usage=None, model="")  # type: ignore[arg-type]

    lines = [TextLine(number, "wrong" if number in (2, 5) else "right") for number in range(8)]
    answers = await TextWork(call).do(lines)
    assert sorted(answer.number for answer in answers) == list(range(8))
    assert {answer.number for answer in answers if answer.failed} == {2, 5}


@pytest.mark.anyio
async def test_a_model_without_the_task_ends_the_job(texts: Path) -> None:
    async with engine_on(LetterModel(CARD)) as engine:
        with pytest.raises(Unsupported):
            await run(texts, TextWork(engine.classify), "out.jsonl")


def test_a_job_without_pyarrow_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    write_texts(tmp_path / "in.txt", ["a"])
    with ExitStack() as stack, pytest.raises(ConfigError, match=r"pip install 'staged-pool\[batch\]'"):
        open_texts(
            stack,
            tmp_path / "in.txt",
            tmp_path / "out.parquet",
            None,
            formats=TextFormats("text", "parquet"),
            identity={},
            existing="reject",
        )
