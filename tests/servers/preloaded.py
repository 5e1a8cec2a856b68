"""Commands of Python that start without their imports, as copies of `tests.servers.preloader`."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, Final

from tests.servers.preloader import MESSAGE_BYTES, Preloaded

ROOT: Final = Path(__file__).parents[2]
ONLY_OURS: Final = "STAGED_POOL_"
"""Variables that the imports do not read begin so: a copy may have others than the process that it is copied from."""


def can_preload(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return True for `python -c` and `python -m`, if no variable could change what the imports do."""
    return (
        len(command) > 2
        and command[0] == sys.executable
        and command[1] in ("-c", "-m")
        and all(name.startswith(ONLY_OURS) for name in environment)
    )


class PreloadedProcess:
    """A process that begins with everything imported; the part of `subprocess.Popen` that servers' tests use.

    Args:
        command: See `can_preload`.
        kind: The imports that it begins with.
        folder: Its working directory.
        environment: All of its variables.
        stderr: A file, or its descriptor.
        stdout: The same. By default that of this process.
        pass_fds: Descriptors that it inherits, under their numbers.
    """

    def __init__(
        self,
        command: Sequence[str],
        kind: Preloaded,
        *,
        folder: Path,
        environment: Mapping[str, str],
        stderr: IO[bytes] | int,
        stdout: IO[bytes] | int = 1,
        pass_fds: Sequence[int] = (),
    ) -> None:
        _, form, program, *arguments = command
        self.returncode: int | None = None
        self._preloader = _preloader(kind)
        self.pid = self._preloader.start(
            {
                "form": form,
                "program": program,
                "arguments": arguments,
                "environment": dict(environment),
                "folder": str(folder),
                "descriptors": [0, 1, 2, *pass_fds],
            },
            [0, *(each if isinstance(each, int) else each.fileno() for each in (stdout, stderr)), *pass_fds],
        )

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._preloader.code_of(self.pid, 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._preloader.code_of(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(["a preloaded process"], timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Preloader:
    """The process that is copied, and the ends of its copies."""

    def __init__(self, kind: Preloaded) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()
        with theirs:
            number = theirs.fileno()
            # One thread of BLAS: a process with others may not be copied.
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "tests.servers.preloader", kind, str(number)]
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[number])
        self._receive()  # it is ready

    def start(self, message: dict[str, Any], descriptors: Sequence[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)
            while "started" not in (answer := self._receive()):
                pass
        return int(answer["started"])

    def code_of(self, pid: int, timeout_s: float | None) -> int | None:
        """Return the exit code of a copy; None if it runs on."""
        latest = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                if pid in self._codes:
                    return self._codes.pop(pid)
                left_s = None if latest is None else max(0.0, latest - time.monotonic())
                if not select.select([self._socket], [], [], left_s)[0]:
                    return None
                self._receive()

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def _receive(self) -> dict[str, Any]:
        raw = self._socket.recv(MESSAGE_BYTES)
        assert raw, f"the preloaded process ended with {self._process.wait()}"
        answer: dict[str, Any] = json.loads(raw)
        if "ended" in answer:
            self._codes[answer["ended"]] = answer["code"]
        return answer


@cache
def _preloader(kind: Preloaded) -> _Preloader:
    """Start it once; it ends with this process."""
    made = _Preloader(kind)
    atexit.register(made.close)
    return made
