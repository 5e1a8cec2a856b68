"""Files of a job: parts that get their names at the end, synced folders, and locks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from staged_pool.stages.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class Closes(Protocol):
    """Anything that can be closed."""

    def close(self) -> None: ...


def part_of(path: Path) -> Path:
    """Return the path of a file until it is complete."""
    return path.with_name(f"{path.name}.part")


def journal_of(output: Path) -> Path:
    """Return the path of the journal of a job, by that of its output."""
    return output.with_name(f"{output.name}.journal")


def rows_of(output: Path) -> Path:
    """Return the path of rows that become an output, without its `.part`."""
    return output.with_name(f"{output.name}.rows")


def open_part(path: Path, safe_bytes: int | None) -> BinaryIO:
    """Open the part of a file for reading and writing, at its end.

    Args:
        path: Path of the complete file.
        safe_bytes: Size to which the part is cut. None: begin a new part.

    Raises:
        ConfigError: The part cannot be opened, or is shorter than `safe_bytes`.
    """
    part = part_of(path)
    try:
        file = part.open("w+b" if safe_bytes is None else "r+b", buffering=0)
    except OSError as error:
        raise ConfigError(f"{part}: the file cannot be opened: {error.strerror}") from error
    size = file.seek(0, os.SEEK_END)
    if safe_bytes is not None and size < safe_bytes:
        file.close()
        raise ConfigError(
            f"{part}: it has {size} bytes, and its journal says {safe_bytes}: it was changed; overwrite it"
        )
    file.truncate(safe_bytes or 0)
    file.seek(safe_bytes or 0)
    return file


@contextmanager
def closed_on_error(file: Closes) -> Iterator[None]:
    """Close a file if the block raises."""
    try:
        yield
    except BaseException:
        file.close()
        raise


def write_all(file: BinaryIO, content: bytes | memoryview) -> None:
    """Write the whole content to an unbuffered file; a single call may write less."""
    left = memoryview(content).cast("B")
    while left:
        left = left[file.write(left) :]


def publish(output: Path, errors: Path | None = None) -> None:
    """Give complete parts their names, in place of older files. Called again, it does the rest.

    Args:
        output: The output.
        errors: The file of failed lines. If its part is empty, no file of this name is left.
    """
    if errors is not None and (part := part_of(errors)).exists():
        if part.stat().st_size:
            os.replace(part, errors)
        else:
            errors.unlink(missing_ok=True)
            part.unlink()
        sync_folder(errors.parent)
    if part_of(output).exists():
        os.replace(part_of(output), output)
    part_of(rows_of(output)).unlink(missing_ok=True)
    sync_folder(output.parent)


def drop_parts(output: Path, errors: Path | None) -> None:
    """Remove the parts of a job without any line."""
    for path in (output, rows_of(output), errors):
        if path is not None:
            part_of(path).unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Sync the names of files in a folder to the disk."""
    if fcntl is not None:  # on Windows, folders cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def lock(file: BinaryIO) -> bool:
    """Lock an open file until it is closed. Returns False if another process has locked it."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
