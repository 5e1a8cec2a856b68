"""Runs of batches: their statuses, deadlines, cancellation, and the end or the restart of the server."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Literal, TypeAlias

import anyio
import anyio.to_thread

from staged_pool.api.batches.check import check_input
from staged_pool.api.batches.records import Batch, BatchFault, Status, StoredFile
from staged_pool.api.batches.store import Store
from staged_pool.api.bulk.batch_lines import BatchAnswer, BatchAnswers, BatchLine, Fault
from staged_pool.api.bulk.job import Progress
from staged_pool.api.bulk.opening import BATCH_WINDOW, job_files, open_batch
from staged_pool.api.bulk.parts import Work
from staged_pool.runtime.memory.budget import Holding
from staged_pool.stages.errors import ConfigError, StagedPoolError
from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.log import get_logger
from staged_pool.stages.user_code import as_text

MOST_AT_ONCE: Final = 16
"""Maximum number of batches that run at once; each owner has one."""

RETRY_S: Final = 5.0
"""Seconds until an interrupted batch goes on, or a failed one is saved again."""

SWEEP_S: Final = 60.0
"""Seconds between two searches for expired files."""

CLOCK_CHECK_S: Final = 1.0
"""Seconds between two looks at the clock. A clock may be set, or go on while the machine sleeps."""

DISK_CHECK_S: Final = 1.0
"""Seconds between two looks at the size of the output of a running batch."""

Reason: TypeAlias = Literal["shutdown", "cancelled", "expired", "full"]
MakeWork: TypeAlias = Callable[[BatchAnswers, Hashable], Work[BatchLine, BatchAnswer]]
"""Makes the work on the lines of a batch, for a tenant."""

_REST: Final[dict[Status, Fault]] = {
    "cancelled": Fault("batch_cancelled", "The batch was cancelled before this request began"),
    "expired": Fault("batch_expired", "The completion window of the batch ended before this request began"),
    "failed": Fault("storage_full", "The folder of files was full before this request began"),
}
"""Faults of requests that were not begun, by the last status of the batch."""

_ENDINGS: Final[dict[Reason | None, Status]] = {"expired": "expired", "full": "failed"}
_FULL: Final = BatchFault(
    code="storage_full", message="The folder of files has no room for the output; delete files, then run the rest again"
)
_STORAGE: Final = BatchFault(code="storage_failed", message="The server could not read or write the files of the batch")
_BUG: Final = BatchFault(code="internal_error", message="The server failed to run this batch; its log says why")

log = get_logger("staged_pool.batches")


class BatchRunner:
    """Runs the batches of a store, the oldest first. For one event loop.

    Args:
        store: Files and batches.
        make_work: See `MakeWork`.
    """

    def __init__(self, store: Store, make_work: MakeWork) -> None:
        self._store = store
        self._make_work = make_work
        self._running: dict[str, _Control] = {}
        """The batch that runs, by owner."""
        self._started, self._stopping = anyio.Event(), anyio.Event()
        self._news = anyio.Event()
        self._checks = anyio.CapacityLimiter(1)

    def start(self) -> None:
        """Let batches run: the engines take requests."""
        self._started.set()

    def stop(self) -> None:
        """Begin no further request; `run` returns once the others are answered and saved."""
        self._stopping.set()
        self._started.set()
        for control in self._running.values():
            control.stop_for("shutdown")
        self.wake()

    def wake(self) -> None:
        """Look for batches to run: one is new, or one has ended."""
        self._news.set()

    def cancel(self, batch: Batch) -> None:
        """Begin no further request of a batch, whose status is `cancelling` by now."""
        if (control := self._running.get(batch.owner)) is not None and control.batch_id == batch.id:
            control.stop_for("cancelled")
        self.wake()

    async def run(self) -> None:
        """Run batches until `stop`. Batches that have not ended go on with the next start of the server."""
        await self._started.wait()
        async with anyio.create_task_group() as sweeping:
            sweeping.start_soon(self._sweep)
            async with anyio.create_task_group() as running:
                while not self._stopping.is_set():
                    self._news = anyio.Event()
                    for batch in self._next():
                        control = self._running[batch.owner] = _Control(batch.id)
                        running.start_soon(self._run_one, batch, control)
                    await self._news.wait()
            sweeping.cancel_scope.cancel()

    def _next(self) -> Sequence[Batch]:
        """Return the batches that may begin to run now: one for each owner who has none."""
        first: dict[str, Batch] = {}
        for batch in self._store.unfinished():
            if batch.owner not in self._running:
                first.setdefault(batch.owner, batch)
        return list(first.values())[: MOST_AT_ONCE - len(self._running)]

    async def _sweep(self) -> None:
        while True:
            try:
                await self._store.sweep()
            except Exception:
                log.exception("batches.sweep_failed", retry_s=SWEEP_S)
            await anyio.sleep(SWEEP_S)

    async def _run_one(self, batch: Batch, control: _Control) -> None:
        try:
            batch = await self._to_its_end(batch, control)
            if batch.has_ended:
                counts = {"total": batch.total, "completed": batch.completed, "failed": batch.failed}
                log.info("batch.ended", batch=batch.id, status=batch.status, **counts)
        except (OSError, ConfigError) as error:
            log.error("batch.storage_failed", batch=batch.id, reason=str(error))
            await self._fail(batch, _STORAGE)
        except StagedPoolError as error:  # no request can be answered now: it goes on later
            log.warning("batch.interrupted", batch=batch.id, reason=str(error))
            with anyio.move_on_after(RETRY_S):
                await self._stopping.wait()
        except Exception:
            log.exception("batch.crashed", batch=batch.id)
            await self._fail(batch, _BUG)
        finally:
            del self._running[batch.owner]
            self.wake()

    async def _fail(self, batch: Batch, fault: BatchFault) -> None:
        """Fail a batch: at once for its client, and in the folder as soon as that can be written.

        Until then no other batch of its owner begins: it would fail for the same reason.
        """
        failed = await self._store.fail(batch.id, fault)
        while not await self._has_saved(failed):
            with anyio.move_on_after(RETRY_S):
                await self._stopping.wait()
                return  # the next start of the server goes on with it

    async def _has_saved(self, failed: Batch) -> bool:
        """Save a failed batch, and remove what its run has left. Returns False if the folder does not let it."""
        store = self._store
        try:
            try:
                await store.save(failed)
            except OSError:
                if failed.begins_anew:  # its own output may be what fills the disk
                    await anyio.to_thread.run_sync(store.folder.remove_parts, failed)
                raise
            await anyio.to_thread.run_sync(store.folder.remove_parts, failed, store.unlisted(failed))
        except Exception as error:  # noqa: BLE001  # whatever it is, it is one batch's, and not the server's
            log.error("batch.not_saved", batch=failed.id, reason=as_text(error), retry_s=RETRY_S)
            return False
        return True

    async def _to_its_end(self, batch: Batch, control: _Control) -> Batch:
        """Take a batch to its last status, unless `control` stops it for a shutdown."""
        store = self._store
        if batch.status == "validating":
            source = store.folder.content(batch.input_file_id)
            checked = await anyio.to_thread.run_sync(check_input, source, limiter=self._checks)
            if checked.faults:
                return await store.change(
                    batch.id, {"validating": "failed"}, lambda batch: replace(batch, faults=checked.faults)
                )
            batch = await store.change(
                batch.id, {"validating": "in_progress"}, lambda batch: replace(batch, total=checked.total)
            )
        if batch.status == "in_progress":
            finished = await self._work_on(batch, control)
            if not finished and control.reason == "shutdown":
                return batch
            ending = "completed" if finished else _ENDINGS.get(control.reason, "cancelled")
            faults = (_FULL,) if ending == "failed" else ()
            batch = await store.change(
                batch.id, {"in_progress": "finalizing"}, lambda batch: replace(batch, ending=ending, faults=faults)
            )
        if batch.status in ("finalizing", "cancelling"):
            batch = await self._finalize(batch)
        return batch

    async def _work_on(self, batch: Batch, control: _Control) -> bool:
        """Answer the requests of a batch. Returns False if `control` stopped it before all of them."""
        work = _OneEndpoint(self._make_work(BatchAnswers(batch.id), batch.tenant), batch.endpoint)
        with self._store.disk.hold(batch.owner) as held, single_errors():
            async with anyio.create_task_group() as watching:
                watching.start_soon(self._expire, batch, control)
                watching.start_soon(self._watch_disk, batch, control, held)
                finished = await self._run_job(batch, work, control.stop)
                watching.cancel_scope.cancel()
        return finished

    async def _expire(self, batch: Batch, control: _Control) -> None:
        while True:
            left_s = batch.expires_at - self._store.clock()
            if left_s <= 0:
                control.stop_for("expired")
                return
            await anyio.sleep(min(left_s, CLOCK_CHECK_S))

    async def _watch_disk(self, batch: Batch, control: _Control, held: Holding) -> None:
        while True:
            await anyio.sleep(DISK_CHECK_S)
            size = await anyio.to_thread.run_sync(self._store.folder.part_bytes, batch)
            if not held.take(size - held.held_bytes):
                control.stop_for("full")

    async def _run_job(self, batch: Batch, work: Work[BatchLine, BatchAnswer], stop: anyio.Event) -> bool:
        """Run or resume the job of a batch. Returns True if it has finished; one with its output published has."""
        folder = self._store.folder
        if await anyio.to_thread.run_sync(folder.is_published, batch):
            return True
        opening = partial(
            open_batch,
            source=folder.content(batch.input_file_id),
            output=folder.content(batch.output_id),
            errors=folder.content(batch.errors_id),
            identity={"batch": batch.id},
            existing="resume",
        )

        def report(progress: Progress) -> None:
            self._store.count(batch.id, progress.completed, progress.failed)

        async with job_files(opening) as job:
            return (await job.run(work, window=BATCH_WINDOW, report=report, stop=stop)).finished

    async def _finalize(self, batch: Batch) -> Batch:
        """Fail the requests that were not begun, list the files, and set the last status."""
        ending: Status = batch.ending or "cancelled"
        if batch.total:  # else it was cancelled before its input was found to be usable
            rest = _REST.get(ending, _REST["cancelled"])
            await self._run_job(batch, _Rest(BatchAnswers(batch.id), rest), anyio.Event())
        output, completed = await self._list(batch, batch.output_id, "output")
        errors, failed = await self._list(batch, batch.errors_id, "errors")
        ended = await self._store.change(
            batch.id,
            {"finalizing": ending, "cancelling": ending},
            lambda batch: replace(
                batch, output_file_id=output, error_file_id=errors, completed=completed, failed=failed
            ),
        )
        if output is None:  # only now: until it has ended, the empty file says that its job is over
            await anyio.to_thread.run_sync(self._store.folder.remove_content, batch.output_id)
        return ended

    async def _list(self, batch: Batch, file_id: str, kind: str) -> tuple[str | None, int]:
        """List one file of the output of a batch. Returns its id and lines; None if there is no line."""
        store = self._store
        lines, size = await anyio.to_thread.run_sync(store.folder.measure, file_id)
        if not lines:
            return None, 0
        now = store.clock()
        file = StoredFile(
            id=file_id,
            owner=batch.owner,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose="batch_output",
            size=size,
            created_at=int(now),
            order=int(now * 1e9),
            expires_at=int(now) + batch.output_expires_s,
        )
        await store.add_file(file, store.folder.save_file, store.disk.hold(batch.owner))
        return file_id, lines


class _Control:
    """Stops the run of one batch, for one reason: the first one."""

    def __init__(self, batch_id: str) -> None:
        self.batch_id: Final = batch_id
        self.reason: Reason | None = None
        self.stop = anyio.Event()

    def stop_for(self, reason: Reason) -> None:
        self.reason = self.reason or reason
        self.stop.set()


class _OneEndpoint:
    """Work that passes on the requests of one endpoint, and rejects all others."""

    def __init__(self, work: Work[BatchLine, BatchAnswer], endpoint: str) -> None:
        self._work = work
        self._fault = Fault("mismatched_endpoint", f"url: expected {endpoint}, the endpoint of the batch")
        self._endpoint = endpoint

    async def do(self, lines: Sequence[BatchLine]) -> Sequence[BatchAnswer]:
        """Answer lines; see `Work.do`."""
        return await self._work.do(
            [line if line.fault or line.url == self._endpoint else replace(line, fault=self._fault) for line in lines]
        )


class _Rest:
    """Work that answers lines which were not begun."""

    def __init__(self, answers: BatchAnswers, fault: Fault) -> None:
        self._answers = answers
        self._fault = fault

    async def do(self, lines: Sequence[BatchLine]) -> Sequence[BatchAnswer]:
        """Answer lines; see `Work.do`."""
        return [self._answers.refused(line, line.fault or self._fault) for line in lines]
