"""Files of lines, read in pieces of bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Generic

from staged_pool.api.bulk.parts import L
from staged_pool.stages import foreign_text
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.foreign_text import BadText

READ_BYTES: Final = 256 * 2**10
"""Bytes of lines that one read gives, unless a single line has more."""

MAX_LINE_BYTES: Final = 64 * 2**20
"""Maximum bytes of a line. A longer one is a fault of its own, and the next line is read."""

_START_BYTES: Final = 4096
"""Bytes from which the encoding of a file is told."""


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line as it is in the file."""

    number: int
    content: bytes
    """Bytes without the end of the line; empty if the line is too long."""
    fault: str = ""
    """Set if the line is too long."""


class LineReader(Generic[L]):
    """Reads a file of lines. The last line needs no newline.

    Args:
        path: The file.
        parse: Makes a line of its bytes; a faulty one, too.
        skip_blank: Leave out lines of white space. They keep their numbers.

    Raises:
        ConfigError: The file cannot be read, or is not UTF-8.
    """

    def __init__(self, path: Path, parse: Callable[[RawLine], L], *, skip_blank: bool) -> None:
        self._file = open_input(path)
        self._total = os.fstat(self._file.fileno()).st_size
        try:
            self._read = _begin(self._file)
        except BadText as error:
            self._file.close()
            raise ConfigError(f"{path}: the input cannot be read: {error}") from None
        self._number = 0
        self._parse = parse
        self._skip_blank = skip_blank

    @property
    def read_share(self) -> float:
        """Part of the file that is read, from 0 to 1."""
        return min(self._read / self._total, 1.0) if self._total else 1.0

    def read(self) -> Sequence[L]:
        """Return the next lines, in order; none at the end of the file."""
        lines: list[L] = []
        until = self._read + READ_BYTES
        while self._read < until and (raw := self._next()) is not None:
            if raw.fault or raw.content.strip() or not self._skip_blank:
                lines.append(self._parse(raw))
            elif self._read >= until and not lines:
                until += READ_BYTES  # blank lines alone are not the end of the file
        return lines

    def _next(self) -> RawLine | None:
        content = self._file.readline(MAX_LINE_BYTES + 2)  # with its newline
        if not content:
            return None
        number, fault = self._number, ""
        self._number += 1
        self._read += len(content)
        if len(content.removesuffix(b"\n")) > MAX_LINE_BYTES:
            fault = f"The line has more than {MAX_LINE_BYTES} bytes; split it into several"
            while content and not content.endswith(b"\n"):
                content = self._file.readline(READ_BYTES)
                self._read += len(content)
            content = b""
        return RawLine(number, content.removesuffix(b"\n").removesuffix(b"\r"), fault)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check_encoding(path: Path) -> None:
    """Check by its beginning that a file is UTF-8.

    Raises:
        BadText: It is UTF-16 or UTF-32.
        ConfigError: It cannot be read.
    """
    with open_input(path) as file:
        _begin(file)


def _begin(file: BinaryIO) -> int:
    """Go behind the byte order mark of a file. Returns the bytes of the mark."""
    start = file.read(_START_BYTES)
    return file.seek(len(start) - len(foreign_text.unmarked(start)))


def open_input(path: Path) -> BinaryIO:
    """Open the input of a job.

    Raises:
        ConfigError: It is no file that can be read. A pipe has no size and cannot be read again.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: expected a file, which a resumed job can read again")
        return open(path, "rb")
    except OSError as error:
        raise ConfigError(f"{path}: the input cannot be read: {error.strerror}; name a file of texts") from error
