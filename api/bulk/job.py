"""One job: reads lines ahead, has a window of them worked on, and saves the answers as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from staged_pool.api.bulk.journal import Journal
from staged_pool.api.bulk.parts import A, Answer, L, Reader, Work, Writer
from staged_pool.api.bulk.ranges import Ranges
from staged_pool.stages.errors import StagedPoolError
from staged_pool.stages.exception_groups import single_errors

CHECKPOINT_S: Final = 0.5
"""Seconds between two checkpoints. More lines are done again after an end of the process, if it is longer."""

_READ_AHEAD: Final = 2
"""Reads of the reader that wait to be worked on."""


@dataclass(frozen=True, slots=True)
class Window:
    """Bounds on the lines that are worked on or wait to be written. A larger line is worked on alone."""

    lines: int = 4096
    size: int = 8 * 2**20
    """Bytes of these lines, see `Line.size`."""
    group_lines: int = 1
    """Lines that the work gets in one call."""
    group_size: int = 64 * 2**10
    """Bytes of these lines; a larger line is a group of its own."""


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a job while it runs."""

    completed: int
    """Lines with an answer that is no failure, those of earlier runs included."""
    failed: int
    """Lines that have failed, those of earlier runs included."""
    share: float
    """Part of the input that is done, from 0 to 1. It is estimated from the bytes that are read."""
    rate: float
    """Lines a second, of this run and since its beginning."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Outcome of a run."""

    completed: int
    """See `Progress`."""
    failed: int
    """See `Progress`."""
    resumed: int
    """Lines that an earlier run had done."""
    finished: bool
    """True if every line is done and the output is published. False: the run was stopped, and can be resumed."""
    seconds: float
    """Seconds that this run took."""


async def run_job(
    reader: Reader[L],
    work: Work[L, A],
    writer: Writer[A],
    journal: Journal,
    *,
    window: Window,
    report: Callable[[Progress], None],
    stop: anyio.Event | None = None,
) -> Summary:
    """Answer each line of the input that is not done yet, then publish the output.

    Cancellation drops the lines that are worked on, and saves the answers so far. So does an error of the work. The
    caller closes the reader, the writer and the journal, which is removed if the job has finished.

    Args:
        reader: Reads the input from its beginning.
        work: Answers lines.
        writer: Writes answers; opened with the state of the journal.
        journal: Remembers the lines that are done.
        window: Bounds on the lines in memory.
        report: Gets the progress after each write, on the event loop.
        stop: Once set, no further line is begun; the run ends when those that are worked on are saved.

    Raises:
        StagedPoolError: The work can go on no more.
        OSError: The input or the output failed.
    """
    began_at, resumed = time.monotonic(), len(journal.done)
    finished = journal.published
    if not finished:
        run = _Run(reader, work, _Saver(writer, journal), window, report)
        finished = await run.to_the_end(stop or anyio.Event())
    if finished:
        await anyio.to_thread.run_sync(finish, writer, journal)
    return Summary(
        completed=len(journal.done) - journal.failed,
        failed=journal.failed,
        resumed=resumed,
        finished=finished,
        seconds=time.monotonic() - began_at,
    )


def finish(writer: Writer[A], journal: Journal) -> None:
    """Publish the answers so far as the output, and remove the journal. Blocks.

    An end of the process on the way is made up for by the next run.
    """
    if not journal.published:
        writer.complete(journal.done.end)
        journal.publishing()
    writer.publish()
    journal.remove()


class _Run(Generic[L, A]):
    """One run of a job, until its lines are done and saved."""

    def __init__(
        self,
        reader: Reader[L],
        work: Work[L, A],
        saver: _Saver[A],
        window: Window,
        report: Callable[[Progress], None],
    ) -> None:
        self._reader = reader
        self._work = work
        self._saver = saver
        self._done = Ranges(saver.journal.done)  # a copy: the journal goes on in a thread
        self._window = window
        self._room = _Room(window)
        self._report = report
        self._lines_read = 0
        self._failure: StagedPoolError | None = None

    async def to_the_end(self, stop: anyio.Event) -> bool:
        """Work on all lines. Returns False if `stop` came before the last one was begun."""
        # No send waits: a group has its room in the window until its answers are saved.
        send, receive = anyio.create_memory_object_stream[_Answered[A]](self._window.lines)
        try:
            with single_errors():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._save, receive)
                    async with send:
                        ended = await self._work_on_all(send, stop)
        finally:
            with receive:
                left = _answers([receive.receive_nowait() for _ in range(receive.statistics().current_buffer_used)])
            try:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(self._saver.end, left)
            finally:
                _give_back(left)
        return ended

    async def _work_on_all(self, send: MemoryObjectSendStream[_Answered[A]], stop: anyio.Event) -> bool:
        """Begin groups of lines until the input ends or `stop` comes, and wait for them."""
        async with anyio.create_task_group() as working:
            with anyio.CancelScope() as beginning:
                async with anyio.create_task_group() as reading:
                    reading.start_soon(_cancel_at, stop, beginning)
                    send_lines, receive_lines = anyio.create_memory_object_stream[Sequence[L]](_READ_AHEAD)
                    reading.start_soon(self._read, send_lines)
                    async with receive_lines:
                        async for lines in receive_lines:
                            self._lines_read += len(lines)
                            for group in self._groups(lines):
                                size = sum(line.size for line in group)
                                await self._room.take(len(group), size)
                                working.start_soon(self._answer, group, size, send, working.cancel_scope)
                    reading.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure
        return not beginning.cancelled_caught

    async def _read(self, send: MemoryObjectSendStream[Sequence[L]]) -> None:
        async with send:
            while lines := await anyio.to_thread.run_sync(self._reader.read):
                try:
                    await send.send(lines)
                except anyio.BrokenResourceError:  # nobody takes lines any more, and the reason is raised there
                    return

    def _groups(self, lines: Sequence[L]) -> Iterator[Sequence[L]]:
        """Yield the lines that are to be done, in groups for the work."""
        group: list[L] = []
        size = 0
        for line in lines:
            if line.number in self._done:
                continue
            if group and (len(group) == self._window.group_lines or size + line.size > self._window.group_size):
                yield group
                group, size = [], 0
            group.append(line)
            size += line.size
        if group:
            yield group

    async def _answer(
        self, group: Sequence[L], size: int, send: MemoryObjectSendStream[_Answered[A]], working: anyio.CancelScope
    ) -> None:
        try:
            answers = await self._work.do(group)
            send.send_nowait(_Answered(answers, size))
        except StagedPoolError as error:
            # Not raised: all lines fail for the same reason, and the group of their errors would say no more.
            self._failure = self._failure or error
            working.cancel()

    async def _save(self, receive: MemoryObjectReceiveStream[_Answered[A]]) -> None:
        async for first in receive:
            saved = [first, *(receive.receive_nowait() for _ in range(receive.statistics().current_buffer_used))]
            count, size = sum(len(each.answers) for each in saved), sum(each.size for each in saved)
            answers = _answers(saved)
            del first, saved
            try:
                await anyio.to_thread.run_sync(self._saver.save, answers)
            finally:
                _give_back(answers)
                answers.clear()  # the next ones may be long in coming
            self._room.give(count, size)
            self._report(self._saver.progress(self._lines_read, self._reader.read_share))


async def _cancel_at(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


@dataclass(frozen=True, slots=True)
class _Answered(Generic[A]):
    """Answers to a group of lines, and the bytes of these lines."""

    answers: Sequence[A]
    size: int


def _answers(answered: Iterable[_Answered[A]]) -> list[A]:
    return [answer for each in answered for answer in each.answers]


def _give_back(answers: Sequence[Answer]) -> None:
    for answer in answers:
        answer.give_back()


class _Room:
    """Room in the window, which one task takes and another gives back."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._lines = 0
        self._size = 0
        self._given = anyio.Event()

    async def take(self, lines: int, size: int) -> None:
        """Wait for room. A group that is larger than the window waits until nothing else is in it."""
        while self._lines and (self._lines + lines > self._window.lines or self._size + size > self._window.size):
            self._given = anyio.Event()
            await self._given.wait()
        self._lines += lines
        self._size += size

    def give(self, lines: int, size: int) -> None:
        """Give room back."""
        self._lines -= lines
        self._size -= size
        self._given.set()


class _Saver(Generic[A]):
    """Writes answers, and checkpoints from time to time. Its methods run in threads, one at a time."""

    def __init__(self, writer: Writer[A], journal: Journal) -> None:
        self.journal = journal
        self._writer = writer
        self._fresh = Ranges()
        self._resumed = self._count = len(journal.done)
        self._failed = journal.failed
        self._began_at = self._saved_at = time.monotonic()
        self._broken = False

    def save(self, answers: Sequence[A]) -> None:
        """Write answers. An error leaves the job as it was at the last checkpoint."""
        self._write(answers)
        if time.monotonic() - self._saved_at >= CHECKPOINT_S:
            self._checkpoint()

    def end(self, answers: Sequence[A]) -> None:
        """Write the last answers, and make the last checkpoint, unless an earlier write has failed."""
        if self._broken:
            return
        self._write(answers)
        if self._fresh:
            self._checkpoint()

    def progress(self, lines_read: int, read_share: float) -> Progress:
        """Return the progress of the job.

        Args:
            lines_read: Lines that are read, those of earlier runs included.
            read_share: Part of the input that these are, from 0 to 1.
        """
        share = read_share * min(self._count / max(lines_read, 1), 1.0)
        rate = (self._count - self._resumed) / max(time.monotonic() - self._began_at, 1e-9)
        return Progress(completed=self._count - self._failed, failed=self._failed, share=share, rate=rate)

    def _write(self, answers: Sequence[A]) -> None:
        self._broken = True
        self._writer.write(answers)
        self._broken = False
        self._count += len(answers)
        for answer in answers:
            self._fresh.add(answer.number)
            self._failed += answer.failed

    def _checkpoint(self) -> None:
        self._broken = True
        self.journal.checkpoint(self._fresh, self._failed, self._writer.sync())
        self._broken = False
        self._fresh.clear()
        self._saved_at = time.monotonic()
