"""The folder of files and batches: one JSON file about each, written so that a crash leaves the old or the new one.

All functions block. Names of files come from ids that this package makes, never from a client.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO, Final, TypeVar

import msgspec

from staged_pool.api.batches.records import Batch, StoredFile
from staged_pool.api.bulk.files import journal_of, lock, part_of, sync_folder, write_all
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.log import get_logger

R = TypeVar("R", StoredFile, Batch)

_PRIVATE: Final = 0o700
"""Rights of folders: only the server's user may read what clients store."""

_NEW: Final = ".new"
"""Suffix of a file about an object until it is complete."""

log = get_logger("staged_pool.batches")


class Folder:
    """One folder, which no other process can open meanwhile.

    Args:
        path: Path of the folder; it is made if it does not exist.

    Raises:
        ConfigError: The folder cannot be used, or another process has it open.
    """

    def __init__(self, path: Path) -> None:
        self._files, self._batches, self._uploads = (path / name for name in ("files", "batches", "uploads"))
        try:
            for folder in (path, self._files, self._batches, self._uploads):
                folder.mkdir(_PRIVATE, parents=True, exist_ok=True)
            self._lock = (path / "lock").open("wb")
        except OSError as error:
            raise _unusable(path, error) from error
        if not lock(self._lock):
            self._lock.close()
            raise ConfigError(f"batch_dir={str(path)!r}: another server uses it")
        try:
            for left in self._uploads.iterdir():  # of uploads that an end of the process cut off
                _remove_left(left)
        except OSError as error:
            self._lock.close()
            raise _unusable(path, error) from error
        self._path = path

    def close(self) -> None:
        """Let another process open the folder."""
        self._lock.close()

    def content(self, file_id: str) -> Path:
        """Return the path of the content of a file."""
        return self._files / f"{file_id}.content"

    def save_file(self, file: StoredFile) -> None:
        """Save the record of a file."""
        _save(self._files / f"{file.id}.json", msgspec.json.encode(file))

    def save_batch(self, batch: Batch) -> None:
        """Save the record of a batch."""
        _save(self._batches / f"{batch.id}.json", msgspec.json.encode(batch))

    def remove_file(self, file_id: str) -> None:
        """Remove a file: its record first, so that a crash leaves no file without its content."""
        (self._files / f"{file_id}.json").unlink(missing_ok=True)
        sync_folder(self._files)
        self.content(file_id).unlink(missing_ok=True)

    def remove_batch(self, batch_id: str) -> None:
        """Remove a batch."""
        (self._batches / f"{batch_id}.json").unlink(missing_ok=True)

    def remove_content(self, file_id: str) -> None:
        """Remove content that is no file; it may not exist."""
        self.content(file_id).unlink(missing_ok=True)

    def remove_parts(self, batch: Batch, unlisted: Iterable[str] = ()) -> None:
        """Remove what a run of a batch has left that is not to be resumed.

        Args:
            batch: The batch.
            unlisted: Ids of complete output that is no file.
        """
        output, errors = self.content(batch.output_id), self.content(batch.errors_id)
        for path in (journal_of(output), part_of(output), part_of(errors), *map(self.content, unlisted)):
            path.unlink(missing_ok=True)

    def part_bytes(self, batch: Batch) -> int:
        """Return the bytes that the output of a running batch has so far."""
        found = 0
        for file_id in (batch.output_id, batch.errors_id):
            for path in (part_of(self.content(file_id)), self.content(file_id)):
                with suppress(FileNotFoundError):
                    found += path.stat().st_size
        return found

    def is_published(self, batch: Batch) -> bool:
        """Tell if the output of a batch is complete, and its journal gone."""
        output = self.content(batch.output_id)
        return output.exists() and not journal_of(output).exists()

    def measure(self, file_id: str) -> tuple[int, int]:
        """Return the lines and the bytes of a file, which may not exist."""
        path = self.content(file_id)
        lines = size = 0
        with suppress(FileNotFoundError), path.open("rb") as file:
            while piece := file.read(2**20):
                lines, size = lines + piece.count(b"\n"), size + len(piece)
        return lines, size

    def new_upload(self) -> tuple[Path, BinaryIO]:
        """Open a new file for an upload."""
        path = self._uploads / token_hex(16)
        return path, path.open("xb", buffering=0)

    def keep_upload(self, upload: Path, file: StoredFile) -> None:
        """Make a complete and synced upload the content of a file."""
        os.replace(upload, self.content(file.id))
        sync_folder(self._files)
        self.save_file(file)

    def load(self) -> tuple[list[StoredFile], list[Batch]]:
        """Read all records, and remove content without one.

        If something cannot be read, it is left as it is, and so is all content.

        Raises:
            ConfigError: The folder cannot be read.
        """
        try:
            return self._load()
        except OSError as error:
            raise _unusable(self._path, error) from error

    def _load(self) -> tuple[list[StoredFile], list[Batch]]:
        files, strange_files = _load(self._files, StoredFile)
        batches, strange_batches = _load(self._batches, Batch)
        if not strange_files and not strange_batches:
            running = [batch for batch in batches if not batch.has_ended]
            known = {file.id for file in files} | {batch.output_id for batch in running}
            known |= {batch.errors_id for batch in running}
            for path in self._files.iterdir():
                if path.name.partition(".")[0] not in known:
                    _remove_left(path)
        return files, batches


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"batch_dir={str(path)!r}: cannot be used ({error.strerror})")


def _remove_left(path: Path) -> None:
    """Remove a file that belongs to nothing. One that cannot be removed harms nobody, and stays."""
    try:
        path.unlink()
    except OSError as error:
        log.warning("batches.not_removed", file=path.name, reason=str(error))


def _save(path: Path, content: bytes) -> None:
    new = path.with_name(path.name + _NEW)
    with new.open("wb", buffering=0) as file:
        write_all(file, content)
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_folder(path.parent)


def _load(folder: Path, kind: type[R]) -> tuple[list[R], int]:
    """Return the objects of a folder, and the number of unreadable ones."""
    found: list[R] = []
    unreadable = 0
    for path in folder.glob("*.json"):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=kind))
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:  # a newer version's, or changed by hand
            log.warning("batches.unreadable", file=path.name, reason=str(error))
            unreadable += 1
    return found, unreadable
