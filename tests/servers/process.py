"""A server in a process of its own, and commands that run to their end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Final, Self

from tests.servers.preloaded import ROOT, PreloadedProcess, can_preload
from tests.servers.preloader import Preloaded

COMMAND: Final = (
    sys.executable,
    "-c",
    "from staged_pool.api.commands.cli import main; main(prog_name='staged-pool')",
)
"""`staged-pool`, of these sources."""

START_S: Final = 120.0
"""Limit in seconds for a start, in which models are loaded."""
LONGEST_PAUSE_S: Final = 0.1
"""Longest pause in seconds between two looks at a process."""
STEP_S: Final = 20.0
"""Limit in seconds for steps that are quick on any working machine."""
LOG_SHOWN: Final = 20_000
"""Characters of the log of a server that a failing test prints."""

END_S: Final = 60.0
"""Limit in seconds for an end, in which requests are finished."""


def run_command(
    *arguments: str, command: Sequence[str] = COMMAND, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `staged-pool` to its end."""
    return subprocess.run(
        [*command, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | environment,
        check=False,
    )


def wait_until(condition: Callable[[], bool], within_s: float = STEP_S) -> None:
    """Ask often at first, then seldom: what takes long, such as a start, needs the processor."""
    latest, pause_s = time.monotonic() + within_s, 0.004
    while not condition():
        assert time.monotonic() < latest, "it never came"
        time.sleep(pause_s := min(LONGEST_PAUSE_S, 1.2 * pause_s))


def serve_command(*flags: str) -> list[str]:
    """Return the command of a server on a free port, whose log is JSON."""
    return [*COMMAND, "serve", "--port", "0", "--offline", "--log-format", "json", *flags]


class ServerProcess:
    """A server process, and blocking clients of it. At the end of the block it is killed, unless it has ended.

    Args:
        command: See `serve_command`.
        log: File that takes its stderr, or an open one.
        port: Its port. None: the log says it.
        environment: Variables beside those of this process.
        pass_fds: Descriptors that it inherits.
        key: An API key of it, for `ask`.
        trust: Trust in its certificate. None: no TLS.
        preloads: The imports that it begins with, if it can: see `tests.servers.preloaded`. None: nothing; it inherits
            this process's handlers of signals, as the command of a shell does.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path | IO[bytes] | int,
        *,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        key: str | None = None,
        trust: ssl.SSLContext | None = None,
        preloads: Preloaded | None = "models",
    ) -> None:
        variables = {**os.environ, **(environment or {})}
        self.trust = trust
        self._log = log
        self._port = port
        self._headers = {"connection": "close"} | ({} if key is None else {"authorization": f"Bearer {key}"})
        with ExitStack() as stack:
            stderr = stack.enter_context(log.open("wb")) if isinstance(log, Path) else log
            if preloads is not None and can_preload(command, environment or {}):
                self.process: PreloadedProcess | subprocess.Popen[bytes] = PreloadedProcess(
                    command, preloads, folder=ROOT, environment=variables, stderr=stderr, pass_fds=pass_fds
                )
            else:
                self.process = subprocess.Popen(command, cwd=ROOT, stderr=stderr, env=variables, pass_fds=pass_fds)
        self._connections = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._connections.close()
        if kind is not None and isinstance(self._log, Path):
            print(f"Its log ends so:\n{self.log[-LOG_SHOWN:]}")  # the test fails: pytest shows this text
        self.process.kill()
        self.process.wait()

    # Its log

    @property
    def log(self) -> str:
        assert isinstance(self._log, Path), "its log is no file of ours"
        return self._log.read_text(errors="replace")

    @property
    def events(self) -> list[dict[str, Any]]:
        """The lines of its log that are JSON."""
        lines = self.log.splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]

    # Its start and its end

    def wait_until(self, condition: Callable[[], bool], within_s: float = STEP_S) -> None:
        wait_until(condition, within_s)

    def wait_listening(self) -> None:
        """Wait until clients can connect."""
        self._wait_while_it_runs(lambda: self._port is not None or self._listens_at() is not None)

    def wait_ready(self, status: int = 200) -> None:
        """Wait until `/ready` is answered with this status."""
        self._wait_while_it_runs(lambda: self.ask("/ready")[0] == status)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and wait for the end; return the exit code."""
        self.process.send_signal(number)
        return self.exit_code()

    def exit_code(self) -> int:
        """Wait for the end; return the exit code."""
        return self.process.wait(END_S)

    # Its clients

    @property
    def port(self) -> int:
        """The port of TCP; waits until it listens."""
        if self._port is None:
            self.wait_listening()
            self._port = int(str(self._listens_at()).rsplit(":", 1)[1])
        return self._port

    def connect(self) -> socket.socket:
        """Open a connection, which is closed at the end of the block."""
        stream = socket.create_connection(("127.0.0.1", self.port), timeout=STEP_S)
        return self._connections.enter_context(stream)

    def http(self, timeout_s: float = STEP_S) -> http.client.HTTPConnection:
        """Make a client of one connection."""
        if self.trust is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=timeout_s, context=self.trust)

    def ask(self, path: str, body: object = None) -> tuple[int, Any]:
        """GET a path, or POST a JSON body to it; return the status and the content."""
        connection = self.http()
        try:
            if body is None:
                connection.request("GET", path, headers=self._headers)
            else:
                headers = {"content-type": "application/json", **self._headers}
                connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        is_json = answer.headers["content-type"] == "application/json"
        return answer.status, json.loads(content) if is_json else content

    # Its memory

    def forget_peak(self) -> None:
        """Count the peak of its resident set from now on (see proc(5), clear_refs)."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    @property
    def peak_bytes(self) -> int:
        """Peak of its resident set."""
        return self._status_bytes("VmHWM:")

    @property
    def resident_bytes(self) -> int:
        return self._status_bytes("VmRSS:")

    @property
    def mapped_bytes(self) -> int:
        """Size of its address space."""
        return self._status_bytes("VmSize:")

    @property
    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def _status_bytes(self, name: str) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
        raise LookupError(f"{name} is not told")

    def _listens_at(self) -> str | None:
        return next((event["url"] for event in self.events if event["event"] == "server.listening"), None)

    def _wait_while_it_runs(self, condition: Callable[[], bool]) -> None:
        def has_come() -> bool:
            code = self.process.poll()
            assert code is None, f"it ended with {code}: {self.log[-2000:] if isinstance(self._log, Path) else ''}"
            return condition()

        self.wait_until(has_come, START_S)
