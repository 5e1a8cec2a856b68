"""Writer of answers as lines of JSON. Failed ones may have a file of their own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from staged_pool.api.bulk.files import closed_on_error, open_part, publish, write_all
from staged_pool.api.bulk.journal import State
from staged_pool.api.bulk.parts import Answer

BLOCK_BYTES: Final = 64 * 2**10
"""Least bytes of a write, but for the last one."""


class LinesFile:
    """One file of lines, which grows at its end.

    Args:
        path: Path of the file once it is published.
        safe_bytes: Size to go back to. None: begin anew.

    Raises:
        ConfigError: The file cannot be opened.
    """

    def __init__(self, path: Path, safe_bytes: int | None) -> None:
        self.path: Final = path
        self._file = open_part(path, safe_bytes)
        self.size = safe_bytes or 0
        """Bytes of the file."""

    def write(self, answers: Sequence[Answer]) -> None:
        """Write answers, one a line."""
        for block in _blocks(piece for answer in answers for piece in (*answer.pieces(), b"\n")):
            write_all(self._file, block)
            self.size += len(block)

    def sync(self) -> int:
        """Sync the file to the disk. Returns its size in bytes."""
        os.fsync(self._file.fileno())
        return self.size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join small pieces into blocks of some size, for few calls of the system. A large one goes as it is."""
    block = bytearray()
    for piece in pieces:
        if len(piece) >= BLOCK_BYTES:
            if block:
                yield bytes(block)
                block.clear()
            yield piece
            continue
        block += piece
        if len(block) >= BLOCK_BYTES:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


class LinesWriter:
    """Writes answers as lines of JSON, in the order in which they come; see `Writer`.

    Args:
        output: Path of the output.
        errors: Path of the file for answers that have failed. None: they go into the output.
        state: State to go back to. Empty: begin anew.

    Raises:
        ConfigError: A file cannot be opened, or is not as the state says.
    """

    def __init__(self, output: Path, errors: Path | None, state: State) -> None:
        self._output = LinesFile(output, state.get("output"))
        with closed_on_error(self._output):
            self._errors = None if errors is None else LinesFile(errors, state.get("errors"))

    def write(self, answers: Sequence[Answer]) -> None:
        """Write some answers; see `Writer.write`."""
        if self._errors is None:
            self._output.write(answers)
            return
        self._output.write([answer for answer in answers if not answer.failed])
        self._errors.write([answer for answer in answers if answer.failed])

    def sync(self) -> State:
        """Sync both files; see `Writer.sync`."""
        state = {"output": self._output.sync()}
        return state if self._errors is None else {**state, "errors": self._errors.sync()}

    def complete(self, lines: int) -> None:
        """Sync both files: nothing belongs at their end."""
        self.sync()

    def publish(self) -> None:
        """Give both files their names; see `Writer.publish`."""
        self.close()
        publish(self._output.path, None if self._errors is None else self._errors.path)

    def close(self) -> None:
        """Close both files."""
        self._output.close()
        if self._errors is not None:
            self._errors.close()
