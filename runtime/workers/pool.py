"""Pool of worker processes: a crash fails the job at hand alone."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from staged_pool.runtime.workers.jobs import Done, Failed, JobCancelled, JobFailed, NotBegun, Work, WorkerDied
from staged_pool.runtime.workers.pipe import Message, pack
from staged_pool.runtime.workers.process import WorkerProcess
from staged_pool.stages.errors import ConfigError, EngineStopped, StagedPoolError
from staged_pool.stages.log import get_logger

THREAD: Final = "worker-replacement"
"""Name of the threads that replace processes."""

_MORE_TRIES: Final = 2
"""Tries of a job beyond one for each process: all of them may have died while idle."""

log = get_logger("staged_pool.workers")


class Process(Protocol):
    """A process of a pool, such as `WorkerProcess`."""

    @property
    def exit_code(self) -> int | None: ...

    def begin(self, work: Message) -> None: ...

    def wait_until_ready(self) -> None: ...

    def call(self, job: Message) -> Message: ...

    def kill(self) -> None: ...

    def terminate(self) -> None: ...

    def reap(self) -> None: ...

    def end(self) -> None: ...


class Condition(Protocol):
    """A lock that threads wait on, such as `threading.Condition`."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: Any) -> object: ...

    def wait(self) -> object: ...

    def notify(self) -> None: ...

    def notify_all(self) -> None: ...


def _start_thread(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name=THREAD, daemon=True).start()


@dataclass(frozen=True, slots=True)
class Machine:
    """Processes and threads of the operating system. The simulator has doubles of them."""

    process: Callable[[str], Process] = WorkerProcess
    """Starts a process for the pool of a name. Raises `OSError` if there is none."""
    condition: Callable[[], Condition] = threading.Condition
    thread: Callable[[Callable[[], None]], None] = _start_thread
    """Calls a function in another thread. Raises `RuntimeError` if there is none."""


@dataclass(slots=True, eq=False)
class Call:
    """A call of a pool, which `WorkerPool.cancel` ends."""

    process: Process | None = None
    """Process that is the call's for now."""
    is_cancelled: bool = False


class WorkerPool:
    """Runs jobs in processes that have loaded their work. Thread-safe.

    A process does one job at a time, and a call waits for an idle one. A process acknowledges a job before it begins.
    If it dies before that, the job goes to another one. If it dies later, the job fails: it may be the culprit.

    The processes end with `close`, when this object is garbage-collected, or with the program.

    Args:
        name: Name of the pool, for the log and errors, such as `images`.
        work: The work.
        processes: Number of processes.
        lazily: Start a process only for a job that finds none idle. Else all are started here, and a process that dies
            is replaced at once.
        machine: Processes and threads.

    Raises:
        ConfigError: The work cannot be opened.
    """

    def __init__(
        self, name: str, work: Work, processes: int, *, lazily: bool = False, machine: Machine | None = None
    ) -> None:
        self._name = name
        self._work = work
        self._lazily = lazily
        self._tries = processes + _MORE_TRIES
        self._machine = machine or Machine()
        self._changed = self._machine.condition()
        """Lock of what follows. One waiter is notified of each idle process and each vacancy, and all of the end."""
        self._closed = False
        self._idle: list[Process] = []
        self._vacancies = processes
        """Places without a process. The next call that finds none idle starts one."""
        self._all: list[Process] = []
        self._end_all = weakref.finalize(self, _end, self._all)
        if not lazily:
            self._start_all()

    def call(self, job: object) -> Any:
        """Do a job in a process, and return its result. Both are pickled; arrays go through shared memory.

        Raises:
            StagedPoolError: The job has raised it.
            JobFailed: The job has raised another error.
            WorkerDied: The process has died after it began the job; or none can begin it.
            EngineStopped: The pool is closed.
        """
        answer = self.answer(job)
        if isinstance(answer, Done):
            return answer.result
        if isinstance(error := answer.error, StagedPoolError):
            raise error
        log.error("workers.job_failed", pool=self._name, error=str(answer))
        raise JobFailed

    def answer(self, job: object, call: Call | None = None) -> Done | Failed:
        """Do a job in a process, and return its result or its error.

        Args:
            job: The job, which is pickled, as the answer is.
            call: A new call, by which another thread may cancel this one.

        Raises:
            WorkerDied: See `call`.
            EngineStopped: The pool is closed.
            JobCancelled: The call was cancelled.
        """
        message, call = pack(job), call or Call()
        for _ in range(self._tries):
            process = self._take(call)
            try:
                answer = process.call(message)
            except NotBegun:
                self._retire(process, call)
            except BaseException:
                self._retire(process, call)
                self._check(call)
                raise
            else:
                self._give_back(process, call)
                found: Done | Failed = answer.value()
                return found
        raise WorkerDied("processes ended one after another before they began the job")

    def cancel(self, call: Call) -> None:
        """End a call, whatever it does. Its process is killed."""
        with self._changed:
            call.is_cancelled = True
            if call.process is not None:  # under the lock: it could be another call's in a moment
                call.process.kill()
            self._changed.notify_all()

    def close(self) -> None:
        """Terminate all processes, busy ones included."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._end_all()

    def _start_all(self) -> None:
        work = pack(self._work)
        try:
            for _ in range(self._vacancies):
                self._all.append(self._machine.process(self._name))
            for process in self._all:
                process.begin(work)
            for process in self._all:
                process.wait_until_ready()
        except BaseException:
            self.close()
            raise
        self._idle += self._all
        self._vacancies = 0
        log.info("workers.ready", pool=self._name, processes=len(self._idle))

    def _check(self, call: Call) -> None:
        """Raise the error of a call that must end."""
        if self._closed:
            raise EngineStopped("The engine is stopped.")
        if call.is_cancelled:
            raise JobCancelled

    def _take(self, call: Call) -> Process:
        """Wait for an idle process, or start one in a vacancy."""
        with self._changed:
            while not (self._idle or self._vacancies):
                self._check(call)
                self._changed.wait()
            self._check(call)
            if self._idle:
                call.process = process = self._idle.pop()
                return process
            self._vacancies -= 1
        return self._start(call)

    def _start(self, call: Call) -> Process:
        """Start a process in a place that was vacant, for a call.

        Raises:
            WorkerDied: It cannot be started. The place is vacant again.
        """
        process = None
        try:
            process = self._machine.process(self._name)
            with self._changed:
                self._all.append(process)
                call.process = process
                self._check(call)
            process.begin(pack(self._work))
            process.wait_until_ready()
        except BaseException as error:
            if process is not None:
                process.end()
            self._vacate(process, call)
            self._check(call)
            if not isinstance(error, ConfigError | OSError):
                raise
            log.error("workers.process_not_started", pool=self._name, error=str(error))
            raise WorkerDied(str(error)) from error
        return process

    def _give_back(self, process: Process, call: Call) -> None:
        with self._changed:
            call.process = None
            self._idle.append(process)
            self._changed.notify()

    def _vacate(self, process: Process | None, call: Call) -> None:
        """Make the place of an ended process vacant."""
        with self._changed:
            call.process = None
            self._vacancies += 1
            if process is not None:
                self._all.remove(process)
            self._changed.notify()

    def _retire(self, process: Process, call: Call) -> None:
        """End a process, and replace it, in another thread: a new one takes seconds to load its work."""
        with self._changed:
            call.process = None
        is_wanted = call.is_cancelled or self._closed

        def replace() -> None:
            process.reap()
            if not is_wanted:
                log.error("workers.process_died", pool=self._name, exit_code=process.exit_code)
            successor = Call()
            if self._lazily or self._closed:
                self._vacate(process, successor)
                return
            with self._changed:
                self._all.remove(process)
            try:
                self._give_back(self._start(successor), successor)
            except (WorkerDied, EngineStopped):  # which is logged; the next call tries again
                return

        try:
            self._machine.thread(replace)
        except RuntimeError:  # the operating system has no more threads: this one waits
            replace()


def _end(processes: list[Process]) -> None:
    ending = list(processes)
    for process in ending:
        process.terminate()
    for process in ending:
        process.end()
