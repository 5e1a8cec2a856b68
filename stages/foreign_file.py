"""Files that others have written, such as those of a model folder: regular ones alone are read, up to a limit.

A pipe would be waited for without end, and a device such as one of zeros read without end.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

MOST_BYTES: Final = 256 * 2**20
"""Most bytes of a file that is read whole, unless its reader says otherwise."""

_PIECE: Final = 2**20


class BadFile(ValueError):
    """A file that is not read. The message says why, and not which file."""


def check_file(path: Path, most_bytes: int | None = MOST_BYTES) -> None:
    """Reject a file that is not regular, or has too many bytes.

    Args:
        path: The file, or a link to it.
        most_bytes: Limit on its bytes. None: any size.

    Raises:
        BadFile: It is one of these.
        OSError: It cannot be looked at.
    """
    _check(path.stat(), most_bytes)


def open_file(path: Path, most_bytes: int | None = MOST_BYTES) -> BinaryIO:
    """Open a file, which may grow behind the limit while it is read.

    Args:
        path: The file, or a link to it.
        most_bytes: Limit on its bytes. None: any size.

    Raises:
        BadFile: It is not regular, or has too many bytes.
        OSError: It cannot be opened.
    """
    check_file(path, most_bytes)  # to open a pipe would wait for its writer
    file = path.open("rb")
    try:
        _check(os.fstat(file.fileno()), most_bytes)
    except BadFile:
        file.close()
        raise
    return file


def read_file(path: Path, most_bytes: int = MOST_BYTES) -> bytearray:
    """Read a whole file.

    Args:
        path: The file, or a link to it.
        most_bytes: Limit on its bytes. Not more than one piece beyond it is read.

    Raises:
        BadFile: It is not regular, or has too many bytes.
        OSError: It cannot be read.
    """
    content = bytearray()
    with open_file(path, most_bytes) as file:
        while piece := file.read(_PIECE):
            content += piece
            if len(content) > most_bytes:
                raise BadFile(f"it has more than the {most_bytes} bytes that are allowed")
    return content


def _check(found: os.stat_result, most_bytes: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise BadFile("it is no regular file")
    if most_bytes is not None and found.st_size > most_bytes:
        raise BadFile(f"it has {found.st_size} bytes, and {most_bytes} are allowed")
