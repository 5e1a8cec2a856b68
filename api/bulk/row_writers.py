"""Writers of rows of numbers: a file of numpy, and a file of Parquet.

Rows are first written to their places in one file, by their numbers. So they may come in any order, and a resumed job
goes on with the file. At the end, numpy's file gets its header, and Parquet's is made of the rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from staged_pool.api.bulk.files import closed_on_error, open_part, publish, rows_of, write_all
from staged_pool.api.bulk.journal import State
from staged_pool.api.bulk.lines_writer import LinesFile
from staged_pool.api.bulk.parquet import write_parquet
from staged_pool.api.bulk.ranges import Ranges
from staged_pool.api.bulk.texts import TextAnswer

HEADER_BYTES: Final = 128
"""Bytes before the first row: the header of numpy's format, padded."""

READ_BYTES: Final = 4 * 2**20
"""Bytes of rows that are read at once for Parquet."""

_MAGIC: Final = b"\x93NUMPY\x01\x00"
_FLOAT: Final = np.dtype("<f4")


class Rows:
    """File of rows of float32, all of one width, which the first row sets. A row that is missing is NaN.

    Args:
        path: Path of the complete file.
        state: State to go back to. Empty: begin anew.
    """

    def __init__(self, path: Path, state: State) -> None:
        self.path: Final = path
        self.width: int | None = state.get("width")
        """Numbers of a row; None until there is a row."""
        self.labels: Sequence[str] | None = state.get("labels")
        """Names of the labels, if the rows are scores; empty if the model names none."""
        self._end: int = state.get("rows", 0)
        self._missing = Ranges(state.get("missing", ()))  # those before the width is known
        self._file = open_part(path, self._place(self._end) if state else None)
        if not state:
            self._file.truncate(HEADER_BYTES)

    def _place(self, number: int) -> int:
        return HEADER_BYTES + number * (self.width or 0) * _FLOAT.itemsize

    def write(self, answers: Sequence[TextAnswer]) -> None:
        """Write rows to their places, those of neighbours at once."""
        first = next((answer for answer in answers if answer.row is not None), None)
        if self.width is None and first is not None and first.row is not None:
            self.width, self.labels = len(first.row), first.labels
            for start, end in self._missing:
                self._write(start, np.full((end - start, self.width), np.nan, _FLOAT))
            self._missing.clear()
        if self.width is None:
            for answer in answers:
                self._missing.add(answer.number)
            return
        missing = np.full(self.width, np.nan, _FLOAT)
        for some in _neighbours(answers):
            rows = [missing if answer.row is None else answer.row for answer in some]
            self._write(some[0].number, np.stack(rows).astype(_FLOAT, copy=False))

    def _write(self, number: int, rows: NDArray[np.float32]) -> None:
        self._file.seek(self._place(number))
        write_all(self._file, rows.data)
        self._end = max(self._end, number + len(rows))

    def sync(self) -> dict[str, Any]:
        """Sync the rows to the disk. Returns the state."""
        os.fsync(self._file.fileno())
        labels = None if self.labels is None else list(self.labels)
        return {"width": self.width, "labels": labels, "rows": self._end, "missing": list(self._missing)}

    def complete(self, rows: int) -> None:
        """Write the header for this number of rows, and sync the file."""
        self._file.truncate(self._place(rows))
        fields = {"descr": _FLOAT.str, "fortran_order": False, "shape": (rows, self.width or 0)}
        header = repr(fields).encode().ljust(HEADER_BYTES - len(_MAGIC) - 3) + b"\n"
        self._file.seek(0)
        write_all(self._file, _MAGIC + len(header).to_bytes(2, "little") + header)
        os.fsync(self._file.fileno())

    def blocks(self) -> Iterator[NDArray[np.float32]]:
        """Yield all rows in order, [some, width] each."""
        width = self.width or 0
        rows = max(1, READ_BYTES // (max(width, 1) * _FLOAT.itemsize))
        self._file.seek(HEADER_BYTES)
        while block := self._file.read(rows * width * _FLOAT.itemsize):
            yield np.frombuffer(block, _FLOAT).reshape(-1, width)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class NumpyWriter:
    """Writes rows as a file of numpy, and failed texts into a file of errors; see `Writer`.

    Args:
        output: Path of the output: float32 [texts, width], NaN for a text that has failed.
        errors: Path of the file of failed texts. None: beside the output.
        state: State to go back to. Empty: begin anew.

    Raises:
        ConfigError: A file cannot be opened, or is not as the state says.
    """

    def __init__(self, output: Path, errors: Path | None, state: State) -> None:
        self._output = output
        self._rows = Rows(self.rows_path(output), state)
        with closed_on_error(self._rows):
            self._errors = LinesFile(errors_of(output, errors), state.get("errors"))

    @staticmethod
    def rows_path(output: Path) -> Path:
        """Return the path of the file of rows."""
        return output

    def write(self, answers: Sequence[TextAnswer]) -> None:
        """Write some answers; see `Writer.write`."""
        self._rows.write(answers)
        self._errors.write([answer for answer in answers if answer.failed])

    def sync(self) -> State:
        """Sync both files; see `Writer.sync`."""
        return {**self._rows.sync(), "errors": self._errors.sync()}

    def complete(self, lines: int) -> None:
        """Write the header; see `Writer.complete`."""
        self._errors.sync()
        self._rows.complete(lines)

    def publish(self) -> None:
        """Give the files their names; see `Writer.publish`."""
        self.close()
        publish(self._output, self._errors.path)

    def close(self) -> None:
        """Close both files."""
        self._rows.close()
        self._errors.close()


class ParquetWriter(NumpyWriter):
    """Writes rows as a file of Parquet, which is made at the end; see `NumpyWriter`.

    The columns are `embedding`, or `label` and `probs`; null for a text that has failed.
    """

    @staticmethod
    def rows_path(output: Path) -> Path:
        """Return the path of the file of rows, which is removed at the end."""
        return rows_of(output)

    def complete(self, lines: int) -> None:
        """Make the output of the rows; see `Writer.complete`."""
        super().complete(lines)
        write_parquet(self._output, self._rows.blocks(), self._rows.width or 0, self._rows.labels, rows=lines)


def errors_of(output: Path, errors: Path | None) -> Path:
    """Return the path of the errors of an output that has no place for them."""
    return errors or output.with_name(f"{output.name}.errors.jsonl")


def _neighbours(answers: Sequence[TextAnswer]) -> Iterator[Sequence[TextAnswer]]:
    """Yield runs of answers whose numbers follow one another."""
    ordered = sorted(answers, key=lambda answer: answer.number)
    for _, run in groupby(enumerate(ordered), key=lambda pair: pair[1].number - pair[0]):
        yield [answer for _, answer in run]
