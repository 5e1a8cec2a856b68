"""Check of the archives that torch writes, before torch reads one.

An archive of a few kilobytes could unpack to any size, and all of it before memory for the model is reserved. So its
entries are compared with the size of the file.
"""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path
from typing import Final

from staged_pool.stages.errors import ConfigError

ZIP: Final = b"PK\x03\x04"
"""First bytes of an archive."""

MOST_PICKLE_BYTES: Final = 4 << 20
"""Most bytes of the pickle, and of other entries that are no values of tensors.

A tensor takes 150 of them. Objects of the pickle take up to a hundred times as many bytes.
"""
MOST_DIRECTORY_BYTES: Final = 8 << 20
"""Most bytes of the list of entries. Each tensor has one, of a hundred bytes."""
_SMALL: Final = 1 << 20
"""Bytes to which compressed entries may unpack beyond the size of the file. Torch compresses none."""

_END: Final = struct.Struct("<4s4H2LH")
_END_64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR: Final = struct.Struct("<4sLQL")


def check_pickle(path: Path, name: str) -> None:
    """Reject an archive that unpacks to far more than the file. A bare pickle passes: it is not compressed.

    Args:
        path: The file.
        name: Its name in the error message.

    Raises:
        ConfigError: The archive is damaged, is none that torch writes, or unpacks to too much.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        if file.read(len(ZIP)) != ZIP:
            return
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _END.size - _LOCATOR.size - _END_64.size))
        directory = _directory_bytes(file.read(), size)
        if directory is None:
            raise ConfigError(f"{name}: the weights are damaged: the file ends too early, or torch has not written it")
        if directory > MOST_DIRECTORY_BYTES:
            raise ConfigError(f"{name}: its list of entries has {directory} bytes, and {MOST_DIRECTORY_BYTES} are read")
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise ConfigError(f"{name}: the weights are damaged: {error}") from error
    for entry in entries:
        _, _, inner = entry.filename.partition("/")
        if not inner.startswith("data/") and entry.file_size > MOST_PICKLE_BYTES:
            size_words = f"{entry.file_size} bytes, and {MOST_PICKLE_BYTES} are read"
            raise ConfigError(f"{name}: its entry {entry.filename[:100]!r} unpacks to {size_words}")
    if (unpacked := sum(entry.file_size for entry in entries)) > size + _SMALL:
        raise ConfigError(f"{name}: its entries unpack to {unpacked} bytes, more than the file's {size}")


def _directory_bytes(end: bytes, size: int) -> int | None:
    """Return the bytes of the list of entries. None: it does not end where the records behind it begin.

    Readers of archives find the list in two ways, by its place and from the end of the file. Both must give the same
    one, or torch would read other entries than are checked here.

    Args:
        end: The last bytes of the file.
        size: Bytes of the file.
    """
    if len(end) < _END.size:
        return None
    sign, *_, length, start, comment = _END.unpack(end[-_END.size :])
    if sign != b"PK\x05\x06" or comment:
        return None
    behind = _END.size
    locator = end[-_END.size - _LOCATOR.size : -_END.size]
    if locator.startswith(b"PK\x06\x07"):
        behind += _LOCATOR.size + _END_64.size
        if len(end) < behind or _LOCATOR.unpack(locator)[2] != size - behind:
            return None
        sign, own_bytes, *_, length, start = _END_64.unpack(end[-behind : -_END.size - _LOCATOR.size])
        if sign != b"PK\x06\x06" or own_bytes != _END_64.size - 12:
            return None
    return int(length) if start + length + behind == size else None
