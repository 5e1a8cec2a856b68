"""Files of Parquet, if pyarrow is installed: texts in, vectors or scores out."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from staged_pool.api.bulk.files import part_of
from staged_pool.api.bulk.text_file import open_input
from staged_pool.api.bulk.texts import TextLine
from staged_pool.stages import foreign_text
from staged_pool.stages.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

READ_ROWS = 1024
"""Rows of one read."""


def check_installed(path: Path) -> None:
    """Raise an error if pyarrow is missing.

    Raises:
        ConfigError: Says how to install it.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{path}: Parquet needs the package pyarrow: pip install 'staged-pool[batch]'")


class ParquetReader:
    """Reads the texts of one column.

    Args:
        path: The file.
        column: Name of the column. None: `text`, or the only column of texts.

    Raises:
        ConfigError: The file or the column cannot be read.
    """

    def __init__(self, path: Path, column: str | None) -> None:
        check_installed(path)
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._source = open_input(path)
        try:
            self._file = pq.ParquetFile(self._source)
            column = _column(path, self._file.schema_arrow, column)
        except pa.ArrowInvalid as error:
            self._source.close()
            raise ConfigError(f"{path}: it is no file of Parquet: {error}") from None
        except ConfigError:
            self._source.close()
            raise
        self._batches = self._file.iter_batches(READ_ROWS, columns=[column], use_threads=False)
        self._total: int = max(self._file.metadata.num_rows, 1)
        self._number = 0

    @property
    def read_share(self) -> float:
        """Part of the rows that are read, from 0 to 1."""
        return self._number / self._total

    def read(self) -> Sequence[TextLine]:
        """Return the next texts, in order; none at the end of the file."""
        for batch in self._batches:
            if batch.num_rows:
                first, self._number = self._number, self._number + batch.num_rows
                return [_line(number, text) for number, text in enumerate(_texts(batch.column(0)), start=first)]
        return []

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._source.close()


def _texts(column: pa.Array[Any]) -> Sequence[str | bytes | None]:
    """Return the texts of a column; as bytes if one of them is not UTF-8, which no writer is kept from."""
    import pyarrow as pa

    try:
        texts: Sequence[str | None] = column.to_pylist()
    except UnicodeDecodeError:
        kind = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
        as_bytes: Sequence[bytes | None] = column.cast(kind).to_pylist()
        return as_bytes
    return texts


def _line(number: int, text: str | bytes | None) -> TextLine:
    if text is None:
        return TextLine(number, "", "The text is null")
    try:
        return TextLine(number, text if isinstance(text, str) else foreign_text.decoded(text))
    except foreign_text.BadText as error:
        return TextLine(number, "", f"The text cannot be read: {error}")


def _column(path: Path, schema: pa.Schema, wanted: str | None) -> str:
    import pyarrow as pa

    texts = [field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)]
    if wanted is None and ("text" in texts or len(texts) == 1):
        return "text" if "text" in texts else texts[0]
    if wanted is None or wanted not in texts:
        wrong = "name the column of the texts" if wanted is None else f"there is no column {wanted!r} of texts"
        raise ConfigError(f"{path}: {wrong}; columns of texts: {', '.join(texts) or 'none'}")
    return wanted


def write_parquet(
    output: Path, blocks: Iterable[NDArray[np.float32]], width: int, labels: Sequence[str] | None, *, rows: int
) -> None:
    """Write rows to the part of a file, and sync it. A row of NaN becomes null.

    Args:
        output: Path of the complete file.
        blocks: The rows, [some, width] each.
        width: Numbers of a row. 0: all rows are null.
        labels: Names of the labels, if the rows are scores; empty if the model names none. None: vectors.
        rows: Number of rows.
    """
    check_installed(output)
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = pa.list_(pa.float32(), width)
    fields = {"embedding": numbers} if labels is None else {"label": pa.string(), "probs": numbers}
    with part_of(output).open("wb") as file:
        with pq.ParquetWriter(file, pa.schema(fields)) as writer:
            if width == 0:
                writer.write_table(pa.table({name: pa.nulls(rows, kind) for name, kind in fields.items()}))
            else:
                for block in blocks:
                    writer.write_table(pa.table(_columns(block, labels), schema=pa.schema(fields)))
        file.flush()
        os.fsync(file.fileno())


def _columns(block: NDArray[np.float32], labels: Sequence[str] | None) -> dict[str, Any]:
    import pyarrow as pa

    missing = np.isnan(block[:, 0])  # all numbers of a row are, or none
    numbers = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), block.shape[1], mask=pa.array(missing))
    if labels is None:
        return {"embedding": numbers}
    best = block.argmax(axis=1)
    names = [labels[place] if labels and not lost else None for place, lost in zip(best, missing, strict=True)]
    return {"label": pa.array(names, pa.string()), "probs": numbers}
