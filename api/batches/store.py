"""Index of files and batches in memory, for one event loop; each change is on the disk before it is seen."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import BinaryIO, Final, TypeVar

import anyio
import anyio.to_thread

from staged_pool.api import status
from staged_pool.api.batches.folder import Folder
from staged_pool.api.batches.records import KEPT_S, Batch, BatchFault, Status, StoredFile
from staged_pool.api.status import HttpError
from staged_pool.runtime.memory.budget import ByteAccount, Holding
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.log import get_logger

R = TypeVar("R", StoredFile, Batch)

MOST_KEPT: Final = 10_000
"""Maximum number of files, and of batches, of one owner."""

MOST_UNFINISHED: Final = 100
"""Maximum number of batches of one owner that have not ended."""

log = get_logger("staged_pool.batches")


class Store:
    """Files and batches of all owners.

    Args:
        folder: Folder that keeps them; opened by the caller, who closes it.
        limit_bytes: Maximum bytes of all contents. An owner may have seven times the bytes that it leaves free.
        clock: Unix time in seconds.
    """

    def __init__(self, folder: Folder, limit_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.clock = clock
        self.disk = ByteAccount(limit_bytes)
        """Account of the bytes of contents."""
        self._files: dict[str, StoredFile] = {}
        self._batches: dict[str, Batch] = {}
        self._held: dict[str, Holding] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        """Number of files and of batches by owner."""
        self._changes = anyio.Lock()

    async def load(self) -> None:
        """Read the folder."""
        files, batches = await anyio.to_thread.run_sync(self.folder.load)
        for file in files:
            self._add_file(file, self.disk.hold(file.owner))
        for batch in batches:
            self._batches[batch.id] = batch
            self._counts["batches", batch.owner] += 1

    # Files

    def file(self, file_id: str, owner: str) -> StoredFile:
        """Return a file.

        Raises:
            HttpError: The owner has no such file.
        """
        file = self._files.get(file_id)
        if file is None or file.owner != owner or file.expires_at <= self.clock():
            raise _unknown("file")
        return file

    def unlisted(self, batch: Batch) -> Sequence[str]:
        """Return the ids of the output of a batch that are no files."""
        return [file_id for file_id in (batch.output_id, batch.errors_id) if file_id not in self._files]

    def files(self, owner: str) -> Sequence[StoredFile]:
        """Return all files of an owner, the oldest first."""
        now = self.clock()
        return _sorted(file for file in self._files.values() if file.owner == owner and file.expires_at > now)

    def check_room_for_file(self, owner: str) -> None:
        """Reject a further file of an owner who has too many.

        Raises:
            InvalidInput: The owner has `MOST_KEPT` files.
        """
        if self._counts["files", owner] >= MOST_KEPT:
            raise InvalidInput(f"There are {MOST_KEPT} files already; delete some")

    async def add_file(self, file: StoredFile, save: Callable[[StoredFile], None], held: Holding) -> None:
        """Save a file in a thread, then list it, unless it is listed already.

        Args:
            file: The file.
            save: Saves it.
            held: Counts its bytes, and belongs to the file from now on.
        """
        async with self._changes:
            if file.id in self._files:
                return
            await anyio.to_thread.run_sync(save, file)
            self._add_file(file, held)

    def _add_file(self, file: StoredFile, held: Holding) -> None:
        held.set(file.size)
        self._files[file.id], self._held[file.id] = file, held
        self._counts["files", file.owner] += 1

    async def delete_file(self, file: StoredFile) -> None:
        """Delete a file.

        Raises:
            HttpError: A batch that has not ended reads it.
        """
        async with self._changes:
            if (reader := self._reader_of(file)) is not None:
                message = f"The batch {reader.id} reads this file; cancel the batch first"
                raise HttpError(status.IN_USE, message)
            await self._remove(file)

    def _reader_of(self, file: StoredFile) -> Batch | None:
        """Return a batch that has not ended and reads a file; None if there is none."""
        reading = (batch for batch in self._batches.values() if batch.input_file_id == file.id)
        return next((batch for batch in reading if not batch.has_ended), None)

    async def _remove(self, file: StoredFile) -> None:
        if file.id in self._files:
            await anyio.to_thread.run_sync(self.folder.remove_file, file.id)
            del self._files[file.id]
            self._counts["files", file.owner] -= 1
            self._held.pop(file.id).give_back()

    async def open_content(self, file: StoredFile) -> BinaryIO:
        """Open the content of a file, which the caller closes."""
        try:
            return await anyio.to_thread.run_sync(self.folder.content(file.id).open, "rb")
        except FileNotFoundError:  # deleted meanwhile
            raise _unknown("file") from None

    # Batches

    def batch(self, batch_id: str, owner: str) -> Batch:
        """Return a batch.

        Raises:
            HttpError: The owner has no such batch.
        """
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise _unknown("batch")
        return batch

    def batches(self, owner: str) -> Sequence[Batch]:
        """Return all batches of an owner, the oldest first."""
        return _sorted(batch for batch in self._batches.values() if batch.owner == owner)

    def unfinished(self) -> Sequence[Batch]:
        """Return the batches of all owners that have not ended, the oldest first."""
        return _sorted(batch for batch in self._batches.values() if not batch.has_ended)

    async def add_batch(self, batch: Batch) -> None:
        """Save a new batch, then list it.

        Raises:
            HttpError: The owner has too many batches.
        """
        async with self._changes:
            unfinished = sum(not other.has_ended for other in self._batches.values() if other.owner == batch.owner)
            if unfinished >= MOST_UNFINISHED or self._counts["batches", batch.owner] >= MOST_KEPT:
                message = f"Too many batches: at most {MOST_UNFINISHED} that have not ended, and {MOST_KEPT} in all"
                raise HttpError(status.TOO_MANY_BATCHES, message, retry_after_s=60.0)
            self.file(batch.input_file_id, batch.owner)  # it may be deleted by now
            await anyio.to_thread.run_sync(self.folder.save_batch, batch)
            self._batches[batch.id] = batch
            self._counts["batches", batch.owner] += 1

    async def change(
        self, batch_id: str, to: Mapping[Status, Status], edit: Callable[[Batch], Batch] = lambda batch: batch
    ) -> Batch:
        """Save a batch with another status, then list it. Returns the batch.

        Args:
            batch_id: Id of the batch.
            to: Next status for each one that it may have. In any other one it stays as it is.
            edit: Returns the batch with new values of further fields.
        """
        async with self._changes:
            batch = self._batches[batch_id]
            if (following := to.get(batch.status)) is None:
                return batch
            times = {**batch.times, following: int(self.clock())}
            changed = replace(edit(batch), status=following, times=times)
            await anyio.to_thread.run_sync(self.folder.save_batch, changed)
            self._batches[batch_id] = changed
            return changed

    async def fail(self, batch_id: str, fault: BatchFault) -> Batch:
        """Give a batch that has not ended the status `failed`, in memory only; `save` follows. Returns the batch."""
        async with self._changes:
            batch = self._batches[batch_id]
            if not batch.has_ended:
                times: dict[Status, int] = {**batch.times, "failed": int(self.clock())}
                batch = self._batches[batch_id] = replace(batch, status="failed", times=times, faults=(fault,))
            return batch

    async def save(self, batch: Batch) -> None:
        """Save a batch that has ended, as it is listed.

        Raises:
            OSError: The disk is full, or the folder cannot be written for another reason.
        """
        async with self._changes:
            await anyio.to_thread.run_sync(self.folder.save_batch, batch)

    def count(self, batch_id: str, completed: int, failed: int) -> None:
        """Show the progress of a batch. It is not saved: the journal of its run has it."""
        self._batches[batch_id] = replace(self._batches[batch_id], completed=completed, failed=failed)

    async def sweep(self) -> None:
        """Delete files that have expired, and batches that ended long ago. One that cannot be deleted stays."""
        now = self.clock()
        for file in [file for file in self._files.values() if file.expires_at <= now]:
            with suppress(HttpError):  # a batch still reads it
                await _log_failure(file.id, self.delete_file(file))
        for batch in [batch for batch in self._batches.values() if batch.has_ended]:
            if max(batch.times.values()) + KEPT_S <= now:
                await _log_failure(batch.id, self._forget(batch))

    async def _forget(self, batch: Batch) -> None:
        async with self._changes:
            await anyio.to_thread.run_sync(self.folder.remove_batch, batch.id)
            del self._batches[batch.id]
            self._counts["batches", batch.owner] -= 1


async def _log_failure(object_id: str, deletion: Awaitable[None]) -> None:
    try:
        await deletion
    except OSError as error:
        log.error("batches.not_deleted", id=object_id, reason=str(error))


def _sorted(found: Iterable[R]) -> Sequence[R]:
    return sorted(found, key=lambda each: (each.order, each.id))


def _unknown(kind: str) -> HttpError:
    """Return the error for an id that its owner does not have. It does not repeat the id, which may be anything."""
    return HttpError(status.NO_OBJECT, f"There is no {kind} with this id")
