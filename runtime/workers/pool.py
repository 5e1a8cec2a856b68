"""Pool of worker processes: a crash fails the job at hand alone."""

from __future__ import annotations

import queue
import threading
import weakref
from typing import Any, Final

from staged_pool.runtime.workers.jobs import Done, JobFailed, Work, WorkerDied
from staged_pool.runtime.workers.process import WorkerProcess
from staged_pool.stages.errors import ConfigError, EngineStopped
from staged_pool.stages.log import get_logger

THREAD: Final = "worker-replacement"
"""Name of the threads that replace processes."""

log = get_logger("staged_pool.workers")


class WorkerPool:
    """Runs jobs in processes that have loaded their work before. Thread-safe.

    A process does one job at a time, and a call waits for an idle one. A process that dies is replaced. The processes
    end with `close`, when this object is garbage-collected, or with the program.

    Args:
        name: Name of the pool, for the log and errors, such as `images`.
        work: The work.
        processes: Number of processes.

    Raises:
        ConfigError: The work cannot be opened.
    """

    def __init__(self, name: str, work: Work, processes: int) -> None:
        self._name = name
        self._work = work
        self._lock = threading.Lock()
        self._closed = False
        self._idle: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()
        self._all: set[WorkerProcess] = set()
        self._end_all = weakref.finalize(self, _end, self._all)
        started = [self._start() for _ in range(processes)]
        try:
            for process in started:
                process.begin(work)
            for process in started:
                process.wait_until_ready()
                self._idle.put(process)
        except BaseException:
            self.close()
            raise
        log.info("workers.ready", pool=name, processes=processes)

    def call(self, job: object) -> Any:
        """Do a job in a process, and return its result. Both are pickled; arrays go through shared memory.

        Raises:
            StagedPoolError: The job has raised it.
            JobFailed: The job has raised another error.
            WorkerDied: The process has died.
            EngineStopped: The pool is closed.
        """
        process = self._idle.get()
        if process.exit_code is not None:  # it died while idle, for lack of memory for example
            self._replace_soon(process)
            process = self._idle.get()
        try:
            answer = process.call(job)
        except BaseException as error:
            self._replace_soon(process)
            if self._closed and isinstance(error, WorkerDied):
                raise EngineStopped("The engine is stopped.") from error
            raise
        self._idle.put(process)
        if isinstance(answer, Done):
            return answer.result
        if answer.error is not None:
            raise answer.error
        log.error("workers.job_failed", pool=self._name, error=answer.reason)
        raise JobFailed

    def close(self) -> None:
        """Terminate all processes, busy ones included."""
        with self._lock:
            self._closed = True
        self._end_all()

    def _start(self) -> WorkerProcess:
        with self._lock:
            if self._closed:
                raise EngineStopped("The engine is stopped.")
            process = WorkerProcess(self._name)
            self._all.add(process)
        return process

    def _replace_soon(self, process: WorkerProcess) -> None:
        """Replace a process in another thread: a new one takes seconds to load its work."""
        threading.Thread(target=self._replace, args=(process,), name=THREAD, daemon=True).start()

    def _replace(self, process: WorkerProcess) -> None:
        """Replace a process that died.

        The new process becomes idle even if it cannot open the work: a thread that waits for a process must get one.
        """
        process.reap()
        with self._lock:
            self._all.discard(process)
        if self._closed:
            self._idle.put(process)
            return
        log.error("workers.process_died", pool=self._name, exit_code=process.exit_code)
        try:
            process = self._start()
            process.begin(self._work)
            process.wait_until_ready()
        except (ConfigError, EngineStopped) as error:
            log.error("workers.process_not_replaced", pool=self._name, error=str(error))
        self._idle.put(process)


def _end(processes: set[WorkerProcess]) -> None:
    for process in list(processes):
        process.end()
