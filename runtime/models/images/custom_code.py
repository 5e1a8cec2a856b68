"""Image processors that are Python code of the model folder, each in a process of its own.

Nothing is known of such code: how long it holds the interpreter's lock, for which everything else would wait, and
whether it brings its process down. A process that dies fails the image that it had, and is replaced.
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
from staged_pool.runtime.models.images.decode import Colour, Limits
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
"""How long a process that was told to end has for it."""

_ERRORS: Final[Mapping[str, type[InvalidInput]]] = {
    kind.__name__: kind for kind in (TooLarge, UnsupportedMedia, UnusableMedia)
}


class CustomCodeProcessor:
    """Runs a folder's own image processor. Any number of threads may call it; as many calls run at once as there are
    processes.

    The processes end with `close`, else when nobody holds this any more, at the latest with the program.

    Args:
        folder: Of the model. Its code is run.
        limits: What is decoded at most.
        processes: How many are kept.

    Raises:
        ConfigError: The code cannot be loaded.
    """

    def __init__(self, folder: Path, limits: Limits, processes: int) -> None:
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
            TooLarge: It has more bytes or pixels than are taken.
            UnsupportedMedia: It is in a format that is not read here.
            UnusableMedia: It is damaged, or the code refuses it or dies of it.
            EngineStopped: The processes are being ended.
        """
        process = self._idle.get()
        try:
            pixels = process.read(data, background)
        except InvalidInput:
            self._idle.put(process)
            raise
        except _Died as error:
            # Loading takes seconds, which neither this image nor the next one has to wait for.
            threading.Thread(target=self._replace, args=(process,), name="own-code", daemon=True).start()
            if self._closed:
                raise EngineStopped("The engine is stopped.") from error
            raise UnusableMedia("The model's own image processor broke down on the image.") from error
        self._idle.put(process)
        return pixels

    def close(self) -> None:
        """End all processes, what they do included."""
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
        """Put another process in the place of one that died: also one that cannot load the code any more, since who
        waits for a process must get one."""
        process.bury()
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


class _Died(Exception):
    """The process is gone."""


class _Process:
    """One process, which answers one question at a time."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout

    @property
    def exit_code(self) -> int | None:
        """Negative: the number of the signal that ended it. None: it runs."""
        return self._process.poll()

    def wait_until_ready(self) -> None:
        """Return when the code is loaded.

        Raises:
            ConfigError: It cannot be.
        """
        try:
            head, _ = receive(self._from)
        except EOFError as error:
            raise ConfigError(f"the folder's own image processor ended its process ({self._process.wait()})") from error
        if (message := head.get("error")) is not None:
            raise ConfigError(str(message))

    def read(self, data: bytes, background: Colour) -> Pixels:
        try:
            send(self._to, {"background": list(background)}, data)
            head, values = receive(self._from)
        except (OSError, EOFError, ValueError) as error:
            raise _Died from error
        if (kind := head.get("error")) is not None:
            raise _ERRORS.get(str(kind), UnusableMedia)(str(head.get("message")))
        array = np.frombuffer(values, dtype=np.float32).reshape(head["shape"])
        grid = head.get("grid")
        return Pixels(array, None if grid is None else (int(grid[0]), int(grid[1])))

    def bury(self) -> None:
        """End what is ending: its exit code is to be its own."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self.end()

    def end(self) -> None:
        # Its input is not closed first: another thread may be writing to it.
        self._process.terminate()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for end in (self._to, self._from):
            with suppress(OSError, ValueError):  # what was written last has nowhere to go
                end.close()
