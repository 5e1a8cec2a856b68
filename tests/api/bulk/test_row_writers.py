"""Rows are at their places in numpy's and Parquet's files, written in any order."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.api.bulk.journal import State
from staged_pool.api.bulk.row_writers import NumpyWriter, ParquetWriter
from staged_pool.api.bulk.texts import TextAnswer
from staged_pool.stages.errors import ConfigError
from tests.api.bulk.jobs import read_now

LABELS = ("no", "yes")


def row(number: int, labels: Sequence[str] | None = None) -> TextAnswer:
    """Return the answer to a text: a row that differs from all others."""
    return TextAnswer(number, np.array([number, -number], np.float32), labels)


def lost(number: int) -> TextAnswer:
    """Return the answer to a text that has failed."""
    return TextAnswer(number, error={"message": "wrong"})


ORDERS = st.permutations(range(12))


@given(ORDERS, st.sets(st.integers(0, 11)), st.lists(st.integers(0, 11), max_size=4), st.data())
def test_rows_are_at_their_places(order: list[int], failed: set[int], cuts: list[int], data: st.DataObject) -> None:
    """Write in any order, and lose the rows after each cut, as after kills."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.npy"
        state: State = {}
        places = [0, *sorted(cuts), len(order)]
        for start, end in pairwise(places):
            torn = order[end : end + data.draw(st.integers(0, 3))]
            writer = NumpyWriter(output, None, state)
            writer.write([lost(number) if number in failed else row(number) for number in order[start:end]])
            state = writer.sync()
            writer.write([row(number) for number in torn])
            writer.close()
        writer = NumpyWriter(output, None, state)
        writer.complete(len(order))
        writer.publish()
        found = np.load(output)
        assert found.dtype == np.float32
        for number in order:
            if number in failed:
                assert np.isnan(found[number]).all()
            else:
                assert found[number].tolist() == [number, -number]
        errors = Path(folder) / "out.npy.errors.jsonl"
        assert errors.exists() == bool(failed)
        if failed:
            assert {line["index"] for line in read_now(errors)} == failed


def test_an_output_whose_texts_have_all_failed_has_no_width(tmp_path: Path) -> None:
    writer = NumpyWriter(tmp_path / "out.npy", None, {})
    writer.write([lost(0), lost(1)])
    writer.sync()
    writer.complete(2)
    writer.publish()
    assert np.load(tmp_path / "out.npy").shape == (2, 0)


@pytest.mark.parametrize("labels", [None, LABELS, ()])
def test_parquet_has_the_rows_in_order(tmp_path: Path, labels: Sequence[str] | None) -> None:
    errors = tmp_path / "wrong.jsonl"
    writer = ParquetWriter(tmp_path / "out.parquet", errors, {})
    writer.write([row(2, labels), lost(1)])
    state = writer.sync()
    writer.close()
    writer = ParquetWriter(tmp_path / "out.parquet", errors, state)
    writer.write([row(0, labels)])
    writer.complete(3)
    writer.publish()
    table = pq.read_table(tmp_path / "out.parquet").to_pydict()
    numbers = [[0.0, 0.0], None, [2.0, -2.0]]
    if labels is None:
        assert table == {"embedding": numbers}
    else:
        assert table == {"label": ["no", None, "no"] if labels else [None] * 3, "probs": numbers}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "wrong.jsonl"]


def test_parquet_whose_texts_have_all_failed_is_null(tmp_path: Path) -> None:
    writer = ParquetWriter(tmp_path / "out.parquet", None, {})
    writer.write([lost(0), lost(1)])
    writer.complete(2)
    writer.publish()
    assert pq.read_table(tmp_path / "out.parquet").to_pydict() == {"embedding": [None, None]}


def test_parquet_of_many_rows_is_written_in_blocks(tmp_path: Path) -> None:
    width, rows = 4096, 1000  # 16 MB
    writer = ParquetWriter(tmp_path / "out.parquet", None, {})
    for number in reversed(range(rows)):
        writer.write([TextAnswer(number, np.full(width, number, np.float32))])
    writer.complete(rows)
    writer.publish()
    file = pq.ParquetFile(tmp_path / "out.parquet")
    assert file.metadata.num_row_groups > 1
    assert [values[0] for values in file.read().column(0).to_pylist()] == list(range(rows))
    file.close()


def test_rows_that_were_cut_are_an_error(tmp_path: Path) -> None:
    writer = NumpyWriter(tmp_path / "out.npy", None, {})
    writer.write([row(0)])
    state = writer.sync()
    writer.close()
    (tmp_path / "out.npy.part").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"it has 0 bytes, and its journal says 136"):
        NumpyWriter(tmp_path / "out.npy", None, state)
