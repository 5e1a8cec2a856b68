"""Worker processes for an image processor that is custom code of the model folder.

Such code may hold the interpreter's lock for long, or crash its process. In processes of its own it disturbs no other
request. A process that dies fails the image that it had, and is replaced.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from staged_pool.runtime.model import Pixels
from staged_pool.runtime.models.images.decode import Colour, ImageLimits
from staged_pool.runtime.models.images.process_messages import receive, send
from staged_pool.stages.errors import (
    ConfigError,
    EngineStopped,
    InvalidInput,
    TooLarge,
    UnsupportedMedia,
    UnusableMedia,
)
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")

_PROGRAM: Final = "staged_pool.runtime.models.images.custom_code_worker"

_GRACE_S: Final = 2.0
"""Seconds between SIGTERM and SIGKILL."""

_ERRORS: Final[Mapping[str, type[InvalidInput]]] = {
    kind.__name__: kind for kind in (TooLarge, UnsupportedMedia, UnusableMedia)
}


class CustomCodeProcessor:
    """Runs a folder's own image processor in worker processes. Thread-safe.

    A call waits for an idle process. The processes end with `close`, when this object is garbage-collected, or with the
    program.

    Args:
        folder: The model folder, whose code runs.
        limits: Limits of encoded images.
        processes: Number of worker processes.

    Raises:
        ConfigError: The code cannot be loaded.
    """

    def __init__(self, folder: Path, limits: ImageLimits, processes: int) -> None:
        self._command = [sys.executable, "-m", _PROGRAM, str(folder), str(limits.image_bytes), str(limits.pixels)]
        self._lock = threading.Lock()
        self._closed = False
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        self._all: set[_Process] = set()
        self._end_all = weakref.finalize(self, _end, self._all)
        for process in [self._start() for _ in range(processes)]:
            try:
                process.wait_until_ready()
            except ConfigError:
                self.close()
                raise
            self._idle.put(process)

    def read(self, data: bytes, background: Colour) -> Pixels:
        """Decode and prepare one image.

        Raises:
            TooLarge: The image exceeds a limit.
            UnsupportedMedia: The format is not supported.
            UnusableMedia: The image is damaged, or the code rejects it or crashes.
            EngineStopped: The processes are ending.
        """
        process = self._idle.get()
        try:
            pixels = process.read(data, background)
        except InvalidInput:
            self._idle.put(process)
            raise
        except _ProcessDied as error:
            # Loading the code takes seconds: another thread waits for it.
            threading.Thread(target=self._replace, args=(process,), name="custom-code", daemon=True).start()
            if self._closed:
                raise EngineStopped("The engine is stopped.") from error
            raise UnusableMedia("The model's own image processor crashed on the image.") from error
        self._idle.put(process)
        return pixels

    def close(self) -> None:
        """Terminate all processes, busy ones included."""
        with self._lock:
            self._closed = True
        self._end_all()

    def _start(self) -> _Process:
        with self._lock:
            if self._closed:
                raise EngineStopped("The engine is stopped.")
            process = _Process(self._command)
            self._all.add(process)
        return process

    def _replace(self, process: _Process) -> None:
        """Replace a process that died.

        The new process enters the queue even if it cannot load the code: a thread that waits for a process must get
        one.
        """
        process.reap()
        with self._lock:
            self._all.discard(process)
        if self._closed:
            self._idle.put(process)
            return
        log.error("images.process_died", exit_code=process.exit_code)
        try:
            process = self._start()
            process.wait_until_ready()
        except (ConfigError, EngineStopped) as error:
            log.error("images.process_not_replaced", error=str(error))
        self._idle.put(process)


def _end(processes: set[_Process]) -> None:
    for process in list(processes):
        process.end()


class _ProcessDied(Exception):
    """The worker process is gone."""


class _Process:
    """One worker process, which prepares one image at a time."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; the negative number of a signal that ended it. None: it runs."""
        return self._process.poll()

    def wait_until_ready(self) -> None:
        """Wait until the process has loaded the code.

        Raises:
            ConfigError: The code cannot be loaded.
        """
        try:
            head, _ = receive(self._from)
        except EOFError as error:
            raise ConfigError(
                f"the folder's own image processor ended its process (exit code {self._process.wait()})"
            ) from error
        if (message := head.get("error")) is not None:
            raise ConfigError(str(message))

    def read(self, data: bytes, background: Colour) -> Pixels:
        try:
            send(self._to, {"background": list(background)}, data)
            head, values = receive(self._from)
        except (OSError, EOFError, ValueError) as error:
            raise _ProcessDied from error
        if (kind := head.get("error")) is not None:
            raise _ERRORS.get(str(kind), UnusableMedia)(str(head.get("message")))
        array = np.frombuffer(values, dtype=np.float32).reshape(head["shape"])
        grid = head.get("grid")
        return Pixels(array, None if grid is None else (int(grid[0]), int(grid[1])))

    def reap(self) -> None:
        """Wait for a dying process first, so that its exit code shows its own reason."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self.end()

    def end(self) -> None:
        """Terminate the process, and kill it if it does not end in time."""
        # Its input is not closed first: another thread may be writing to it.
        self._process.terminate()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for end in (self._to, self._from):
            with suppress(OSError, ValueError):  # the last buffered bytes cannot be flushed
                end.close()
