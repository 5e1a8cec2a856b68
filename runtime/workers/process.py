"""One process of a pool, as the pool sees it."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack, suppress
from typing import Final

from staged_pool.runtime.machine.interpreter import module_command
from staged_pool.runtime.machine.standard_files import inherited_number
from staged_pool.runtime.workers.jobs import Failed, NotBegun, WorkerDied
from staged_pool.runtime.workers.pipe import Message, Pipe, open_pipe
from staged_pool.stages.errors import ConfigError

_PROGRAM: Final = "staged_pool.runtime.workers.program"

_GRACE_S: Final = 2.0
"""Seconds between the end of the pipe and SIGKILL."""


class WorkerProcess:
    """A process that does one job at a time. One thread at a time may use it; any thread may kill or end it.

    It runs in a session of its own: signals of a terminal go to the server alone. It ends with its pipe, and so with
    this process, however that ends.

    Only the end of its pipe tells that it is gone. A killed process has no exit code while one of its threads still
    ends, though its main thread reads nothing more.

    Args:
        pool: Name of its pool, for errors.

    Raises:
        OSError: The operating system has no more processes, descriptors or memory.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        ours, theirs = open_pipe()
        self._pipe = Pipe(*ours)
        with ExitStack() as files, ExitStack() as unless_started:
            for descriptor in theirs:
                files.callback(os.close, descriptor)
            unless_started.callback(self._pipe.close)
            numbers = [inherited_number(descriptor, files) for descriptor in theirs]
            self._process = subprocess.Popen(
                module_command(_PROGRAM, *map(str, numbers)),
                stdin=subprocess.DEVNULL,
                pass_fds=numbers,
                start_new_session=True,
            )
            unless_started.pop_all()

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; the negative number of a signal that ended it. None: it has not ended."""
        return self._process.poll()

    def begin(self, work: Message) -> None:
        """Send the work, which the process opens."""
        with suppress(OSError):  # it has ended, which `wait_until_ready` tells
            self._pipe.send(work)

    def wait_until_ready(self) -> None:
        """Wait until the process has opened its work.

        Raises:
            ConfigError: It cannot be opened.
        """
        try:
            answer = self._pipe.receive().value()
        except (OSError, EOFError) as error:
            raise ConfigError(
                f"preprocess of {self._pool}: a worker ended its process (exit code {self._process.wait()})"
            ) from error
        if isinstance(answer, Failed):
            is_told = answer.kind == ConfigError.__name__
            raise ConfigError(answer.reason if is_told else str(answer))

    def call(self, job: Message) -> Message:
        """Do a job. Returns the answer, `Done` or `Failed`.

        Raises:
            NotBegun: The process is gone, and has not begun the job.
            WorkerDied: The process has ended after it began the job.
        """
        try:
            self._pipe.send(job)
            return self._pipe.receive()
        except (OSError, EOFError, ValueError) as error:  # ValueError: `end` has closed the pipe
            raise (WorkerDied if self._pipe.is_received else NotBegun) from error

    def kill(self) -> None:
        """Kill the process at once, whatever it does. A running `call` ends."""
        self._process.kill()
        self._pipe.shut_down()

    def terminate(self) -> None:
        """Let the process end: at once, unless its job holds the interpreter's lock."""
        self._pipe.shut_down()

    def reap(self) -> None:
        """Wait for a dying process first, so that its exit code shows its own reason."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self.end()

    def end(self) -> None:
        """Terminate the process, and kill it if it does not end in time."""
        self.terminate()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._pipe.close()  # last: another thread may be using it
