"""Journal of a job: which lines are done, and how far the files of the output are safe.

It is a file of lines, each with the CRC of its content. The first one is the identity of the job. Each further one is
a checkpoint: the lines that are done since the last one, and the state of the writer. A checkpoint is written after
the output has been synced, so these lines are on the disk. The end of the process can only tear the last line, which
is then dropped. Without its first line a journal belongs to no job.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Any, BinaryIO, Final, TypeAlias

import orjson

from staged_pool.api.bulk.files import lock, sync_folder, write_all
from staged_pool.api.bulk.ranges import Ranges
from staged_pool.stages.errors import ConfigError

State: TypeAlias = Mapping[str, Any]
"""State of a writer as JSON, see `Writer.sync`."""

Identity: TypeAlias = Mapping[str, Any]
"""Identity of a job as JSON: its input, model, task and format. A job is resumed only with an equal one."""

VERSION: Final = 1
_CRC_DIGITS: Final = 8


class Journal:
    """Open journal of one job, which no other process can open meanwhile.

    Args:
        path: Path of its file.
        identity: Identity of the job.
        resume: Continue the job if its journal exists. False: an existing journal is an error.

    All methods block; those after the opening run in threads, one at a time.

    Raises:
        ConfigError: The journal exists, is damaged, belongs to another job, or another process has it open.
    """

    def __init__(self, path: Path, identity: Identity, *, resume: bool) -> None:
        self.path: Final = path
        self.id = token_hex(8)
        """Random id of the job, the same after each resumption."""
        self.done: Final = Ranges()
        """Numbers of the lines that are done."""
        self.failed = 0
        """Number of lines among them that have failed."""
        self.state: State = {}
        """State of the writer at the last checkpoint; empty if there is none."""
        self.published = False
        """True if the output was complete. Its files may not have their names yet."""
        self._file = self._open(resume)
        try:
            self._begin(identity)
        except BaseException:
            self._file.close()
            raise

    @staticmethod
    def discard(path: Path) -> None:
        """Remove a journal, if there is one, so that its job cannot be resumed.

        Raises:
            ConfigError: Another process runs the job.
        """
        if path.exists():
            with _opened(path, os.O_RDWR):
                path.unlink()

    def _open(self, resume: bool) -> BinaryIO:
        try:
            return _opened(self.path, os.O_RDWR | os.O_CREAT | (0 if resume else os.O_EXCL))
        except FileExistsError:
            raise ConfigError(
                f"{self.path}: the journal of an unfinished job is there; resume that job, or overwrite it"
            ) from None

    def _begin(self, identity: Identity) -> None:
        """Read the records of a journal that exists, and cut off its torn end; else write the first one.

        Raises:
            ConfigError: The journal belongs to another job, or its first record is damaged.
        """
        given = {"version": VERSION, "id": self.id, **identity}
        safe, content = 0, self._file.read()
        for record, end in _records(content):
            if safe == 0:
                self._check(record, given)
            else:
                self._take(record)
            safe = end
        if safe == 0 and b"\n" in content:  # an end of the process cannot tear a line that has others behind it
            raise ConfigError(
                f"{self.path}: the journal is damaged in its first line, so it does not tell which lines are done; "
                "bring back a copy of it, or overwrite it to begin anew"
            )
        self._file.truncate(safe)
        self._file.seek(safe)
        if safe == 0:
            self._append(given)
            sync_folder(self.path.parent)

    def _check(self, record: Mapping[str, Any], given: Identity) -> None:
        given = {**given, "id": record.get("id")}
        differing = [
            f"{name} was {record.get(name)!r} and is {given.get(name)!r}"
            for name in sorted({*record, *given})
            if record.get(name) != given.get(name)
        ]
        if differing:
            raise ConfigError(
                f"{self.path}: it belongs to another job: {'; '.join(differing)}; overwrite it to begin anew"
            )
        self.id = record["id"]

    def _take(self, record: Mapping[str, Any]) -> None:
        for first, end in record.get("done", ()):
            self.done.add(first, end)
        self.failed = record.get("failed", self.failed)
        self.state = record.get("state", self.state)
        self.published = record.get("published", False)

    @property
    def is_open(self) -> bool:
        """True until the journal is closed or removed."""
        return not self._file.closed

    def checkpoint(self, fresh: Ranges, failed: int, state: State) -> None:
        """Record lines as done. The files of the output must be synced before.

        Args:
            fresh: Numbers of the lines that are done since the last checkpoint.
            failed: Number of failed lines in the whole job.
            state: State of the writer after these lines.
        """
        self._append({"done": list(fresh), "failed": failed, "state": state})
        for first, end in fresh:
            self.done.add(first, end)
        self.failed, self.state = failed, state

    def publishing(self) -> None:
        """Record that the output is complete: from now on its files get their names."""
        self._append({"published": True})
        self.published = True

    def _append(self, record: Mapping[str, Any]) -> None:
        write_all(self._file, encode_record(record))
        os.fsync(self._file.fileno())

    def remove(self) -> None:
        """Close the journal, and remove its file: the job is over."""
        self.path.unlink()  # before the lock is gone
        self.close()
        sync_folder(self.path.parent)

    def close(self) -> None:
        """Close the journal. The job can be resumed."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _opened(path: Path, flags: int) -> BinaryIO:
    """Open the file of a journal, and lock it."""
    try:
        file = os.fdopen(os.open(path, flags, 0o644), "r+b", buffering=0)
    except FileExistsError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: the journal cannot be opened: {error.strerror}") from error
    if not lock(file):
        file.close()
        raise ConfigError(f"{path}: another process runs this job; wait for its end, or name another output")
    return file


def encode_record(record: Mapping[str, Any]) -> bytes:
    """Encode a record as a line of the file."""
    content = orjson.dumps(record)
    return b"%08x %s\n" % (zlib.crc32(content), content)


def _records(content: bytes) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Yield each whole record, and the offset of its end, up to a torn one."""
    end = 0
    for line in BytesIO(content):
        crc, record = line[:_CRC_DIGITS], line[_CRC_DIGITS + 1 : -1]
        if not line.endswith(b"\n") or crc != b"%08x" % zlib.crc32(record):
            return
        end += len(line)
        yield orjson.loads(record), end
