"""One process of a pool, as the pool sees it."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from typing import Final

from staged_pool.runtime.machine.interpreter import module_command
from staged_pool.runtime.workers.jobs import Done, Failed, Work, WorkerDied
from staged_pool.runtime.workers.pipe import Pipe, open_pipe
from staged_pool.stages.errors import ConfigError

_PROGRAM: Final = "staged_pool.runtime.workers.program"

_GRACE_S: Final = 2.0
"""Seconds between SIGTERM and SIGKILL."""


class WorkerProcess:
    """A process that does one job at a time. One thread at a time may use it.

    It runs in a session of its own: signals of a terminal go to the server alone.

    Args:
        pool: Name of its pool, for errors.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        ours, theirs, down, up = open_pipe()
        with theirs:
            files = (theirs.fileno(), os.dup(up), os.dup(down))
            try:
                self._process = subprocess.Popen(
                    module_command(_PROGRAM, *map(str, files)),
                    stdin=subprocess.DEVNULL,
                    pass_fds=files,
                    start_new_session=True,
                )
            finally:
                for memory in files[1:]:
                    os.close(memory)
        self._pipe = Pipe(ours, down, up)

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; the negative number of a signal that ended it. None: it runs."""
        return self._process.poll()

    def begin(self, work: Work) -> None:
        """Send the work, which the process opens."""
        with suppress(OSError):  # it has ended, which `wait_until_ready` tells
            self._pipe.send(work)

    def wait_until_ready(self) -> None:
        """Wait until the process has opened its work.

        Raises:
            ConfigError: It cannot be opened.
        """
        try:
            answer = self._pipe.receive()
        except (OSError, EOFError) as error:
            raise ConfigError(
                f"preprocess of {self._pool}: a worker ended its process (exit code {self._process.wait()})"
            ) from error
        if isinstance(answer, Failed):
            raise ConfigError(answer.reason)

    def call(self, job: object) -> Done | Failed:
        """Do a job.

        Raises:
            WorkerDied: The process is gone.
        """
        try:
            self._pipe.send(job)
            answer: Done | Failed = self._pipe.receive()
        except (OSError, EOFError, ValueError) as error:
            raise WorkerDied from error
        return answer

    def reap(self) -> None:
        """Wait for a dying process first, so that its exit code shows its own reason."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self.end()

    def end(self) -> None:
        """Terminate the process, and kill it if it does not end in time."""
        # The pipe is closed last: another thread may be using it.
        self._process.terminate()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with suppress(OSError, ValueError):
            self._pipe.close()
