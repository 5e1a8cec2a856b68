"""Files of text have one reader: each door reads alike, and has the same words for a fault."""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import orjson
import pytest

from staged_pool.api.bench.texts import lines_of as lines_of_bench
from staged_pool.api.bench.trace import FORMAT, FORMAT_VERSION, read_trace
from staged_pool.api.bulk.batch_lines import batch_reader
from staged_pool.api.bulk.text_file import LineReader
from staged_pool.api.bulk.texts import read_text_line
from staged_pool.api.commands.config_file import read_config_file
from staged_pool.api.commands.inputs import lines_or_stdin
from staged_pool.api.keys import read_keys
from staged_pool.api.wire.forms import form_text
from staged_pool.runtime.models.folders.chat_pairs import chat_template
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.pipelines.file import read_pipeline
from staged_pool.stages.errors import StagedPoolError
from tests.servers.in_process import invoke_command

KEY = "a-key-of-sixteen-characters"
REQUEST = '{"custom_id": "a", "url": "/v1/embeddings", "body": {}}'
TRACE = "\n".join([
    orjson.dumps({"format": FORMAT, "version": FORMAT_VERSION, "requests": 1}).decode(),
    '{"at_s":0,"route":"/embed","items":1,"tokens":1,"images":0,"body_bytes":9,"priority":"interactive"}',
])  # fmt: skip
PIPELINE = 'name = "p"\n[[stage]]\nname = "vectors"\nmodel = "m"\n'


def _stdin(path: Path) -> object:
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(path.read_bytes()), "ascii")
    try:
        return lines_or_stdin((), "text")
    finally:
        sys.stdin = before


def _texts(path: Path) -> object:
    reader = LineReader(path, read_text_line, skip_blank=False)
    try:
        lines = reader.read()
    finally:
        reader.close()
    if fault := next((line.fault for line in lines if line.fault), ""):
        raise StagedPoolError(fault)
    return [line.text for line in lines]


def _requests(path: Path) -> object:
    reader = batch_reader(path)
    try:
        lines = reader.read()
    finally:
        reader.close()
    if fault := next((line.fault for line in lines if line.fault), None):
        raise StagedPoolError(fault.message)
    return [line.custom_id for line in lines]


def _log(path: Path) -> object:
    done = invoke_command("trace", "record", str(path), "-o", f"{path}.trace", "--overwrite")
    piped = invoke_command("trace", "record", "-", "-o", f"{path}.trace", "--overwrite", stdin=path.read_bytes())
    assert piped.stderr.replace("LOG -", f"LOG {path}") == done.stderr
    if done.returncode:
        raise StagedPoolError(done.stderr)
    return done.stderr


def _pipeline(path: Path) -> object:
    file = read_pipeline(path)
    return file.name, file.stages


LOG = (
    '{"event":"request.finished","path":"/embed","method":"POST","status":200,"items":1,"tokens":1,"body_bytes":9,'
    '"timestamp":"2026-01-01T00:00:00Z","total_ms":1.0}\n'
)

DOORS: Mapping[str, tuple[str, Callable[[Path], object]]] = {
    "standard input": ("one\ntwo\n", _stdin),
    "run-batch, texts": ("one\ntwo\n", _texts),
    "run-batch, requests": (REQUEST + "\n", _requests),
    "keys": (KEY + "\n", read_keys),
    "config": ('port = 8000\nhost = "127.0.0.1"\n', lambda path: read_config_file(path).top.values),
    "pipeline": (PIPELINE, _pipeline),
    "bench, texts": ("one\ntwo\n", lines_of_bench),
    "bench, trace": (TRACE + "\n", read_trace),
    "log": (LOG, _log),
    "form": ("one\ntwo", lambda path: form_text(path.read_bytes(), "input")),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_mark_and_either_line_end_are_no_part_of_a_text(tmp_path: Path, door: str) -> None:
    text, read = DOORS[door]
    path = tmp_path / "file"
    path.write_bytes(text.encode())
    expected = read(path)
    path.write_bytes(codecs.BOM_UTF8 + text.encode())
    assert read(path) == expected
    if door != "form":  # its fields are no lines
        path.write_bytes(codecs.BOM_UTF8 + text.replace("\n", "\r\n").encode())
        assert read(path) == expected


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_another_encoding_is_named(tmp_path: Path, door: str, encoding: str) -> None:
    text, read = DOORS[door]
    path = tmp_path / "file"
    path.write_bytes(text.encode(encoding))
    with pytest.raises(StagedPoolError, match=f"it is {encoding[:6].upper()}, but must be UTF-8"):
        read(path)


@pytest.mark.parametrize("door", sorted(DOORS.keys() - {"log", "bench, trace"}))  # their lines are JSON of a program
def test_bytes_that_are_not_utf_8_are_named_by_their_place(tmp_path: Path, door: str) -> None:
    text, read = DOORS[door]
    path = tmp_path / "file"
    path.write_bytes(text.encode() + b"\nab\xff")
    with pytest.raises(StagedPoolError) as raised:
        read(path)
    line = text.count("\n") + 2
    assert f"it is not UTF-8, from byte 3 of line {line} on" in str(raised.value)


def test_a_file_of_a_model_folder_has_the_same_words(tmp_path: Path) -> None:
    for content, why in (
        ('{"a": 1}'.encode("utf-16"), "it is UTF-16, but must be UTF-8"),
        (b'{\n"a": "\xff"}', "it is not UTF-8, from byte 7 of line 2 on"),
        (codecs.BOM_UTF8 + b"{}", "it begins with a byte order mark; save it as UTF-8 without one"),
    ):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(StagedPoolError) as raised:
            JsonFile.read(tmp_path / "config.json", root=tmp_path)
        assert str(raised.value) == f"config.json: cannot be read as JSON: {why}"
    (tmp_path / "chat_template.jinja").write_bytes(b"a\n\xff")
    with pytest.raises(StagedPoolError, match="it is not UTF-8, from byte 1 of line 2 on"):
        chat_template(tmp_path, root=tmp_path)
