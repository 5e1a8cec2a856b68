"""Server processes: start, wait until ready, stop with all child processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, Literal

import msgspec
import psutil

from perf.tools.client import Connection, Reply, get
from staged_pool.runtime.config import DType, EngineConfig
from staged_pool.runtime.threads.openmp import VARIABLES, spin_briefly

ROOT: Final = Path(__file__).resolve().parents[2]

START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 5.0
POLL_S: Final = 0.005

Backend = Literal["asyncio", "trio"]

MAX_CONNECTIONS: Final = 2000
"""Maximum connections of an open loop.

If a forward takes 1 ms or less, a target delay of 1 s allows more requests than the server's default of 1,000
connections.
"""

_SPARE_CONNECTIONS: Final = 100
"""Connections for health checks."""

PREPARED: Final = (*VARIABLES, "TOKENIZERS_PARALLELISM")
"""Environment variables that `prepare_libraries` sets."""


def program() -> list[str]:
    """Return the start of each command: the script beside the interpreter, or the package where there is no script.

    An installation into a folder of its own (`pip install --target`) puts the script elsewhere.
    """
    script = Path(sys.executable).parent / "staged-pool"
    return [str(script)] if script.exists() else [sys.executable, "-m", "staged_pool"]


def prepare_libraries() -> None:
    """Configure the libraries of this process as `staged-pool serve` does, for fair comparisons.

    Call it before torch is imported.
    """
    spin_briefly()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the server, the library and the bare model, which get the same values."""

    model: str | None = None
    device: str = "auto"
    dtype: DType = "auto"
    torch_threads: int | None = None
    backend: Backend = "asyncio"

    def engine_config(self) -> EngineConfig:
        return EngineConfig(model=self.model, device=self.device, dtype=self.dtype, torch_threads=self.torch_threads)

    def serve_command(self, *, coalesce: bool = False) -> list[str]:
        """Return the command `staged-pool serve` without the port; see `serve_arguments`."""
        return [*program(), *self.serve_arguments(coalesce=coalesce)]

    def serve_arguments(self, *, coalesce: bool = False) -> list[str]:
        """Return `serve` and its flags, without the port; other settings have their defaults.

        Args:
            coalesce: Coalesce equal inputs, the default of a server. False: loads that repeat the same inputs still
                measure forwards.
        """
        command = ["serve"]
        if not coalesce:
            command.append("--no-coalesce")
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None:
                command += [f"--{field.name.replace('_', '-')}", str(value)]
        return command


@dataclass(frozen=True, slots=True)
class Card:
    """Description of the served model in `/ready`: the fields that a comparison depends on."""

    name: str
    dtype: str
    torch_threads: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class _Ready:
    models: tuple[Card, ...]


def overload_flags(target_delay_s: float) -> tuple[str, ...]:
    """Return the flags of `staged-pool serve` for overload: a target delay, and enough connections."""
    connections = MAX_CONNECTIONS + _SPARE_CONNECTIONS
    return "--target-delay", f"{target_delay_s:g}", "--max-connections", str(connections)


class ServerFailed(RuntimeError):
    """A server did not start."""


class Server:
    """One server process, made by `serving`."""

    def __init__(
        self, process: subprocess.Popen[bytes], port: int, log: Path, started: float, start_timeout_s: float
    ) -> None:
        self.process = process
        self.port = port
        self._log = log
        self._started = started
        self._start_timeout_s = start_timeout_s

    def age_s(self) -> float:
        """Return the seconds since just before the start of the process."""
        return time.perf_counter() - self._started

    def wait_listening(self) -> None:
        """Wait until the port accepts a connection."""
        for _ in self._polls():
            with suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", self.port), timeout=START_TIMEOUT_S).close()
                return

    def wait_ok(self, path: str) -> Reply:
        """Wait until a GET of `path` has an answer with 200; return it."""
        self.wait_listening()
        connection = Connection(self.port, timeout_s=START_TIMEOUT_S)
        try:
            for _ in self._polls():
                reply = connection.exchange(get(path))
                if reply.status == 200:
                    return reply
        finally:
            connection.close()
        raise AssertionError("polls end only by raising")

    def wait_answer(self, request: bytes) -> Reply:
        """Repeat a request until its answer is 200; return that answer. The server may close connections meanwhile.

        Raises:
            ServerFailed: The server rejects the request as invalid.
        """
        for _ in self._polls():
            with suppress(OSError):
                connection = Connection(self.port, timeout_s=self._start_timeout_s)
                try:
                    reply = connection.exchange(request)
                finally:
                    connection.close()
                if reply.status == 200:
                    return reply
                if reply.status in {400, 422}:
                    words = reply.body[:300].decode(errors="replace")
                    raise ServerFailed(f"the server rejects the request with {reply.status}: {words}")
        raise AssertionError("polls end only by raising")

    def card(self) -> Card:
        """Return the description of the served model, once it is ready."""
        return msgspec.json.decode(self.wait_ok("/ready").body, type=_Ready).models[0]

    def gauges(self, *names: str) -> dict[str, float]:
        """Return values of `/metrics`, without those that the server does not have."""
        lines = (line.split() for line in self.wait_ok("/metrics").body.decode().splitlines())
        values = {line[0].partition("{")[0]: float(line[-1]) for line in lines if not line[0].startswith("#")}
        return {name: values[name] for name in names if name in values}

    def total(self, name: str) -> float:
        """Return the sum of a counter of `/metrics` over its labels; 0 if the server does not have it."""
        lines = (line.split() for line in self.wait_ok("/metrics").body.decode().splitlines())
        return sum(float(line[-1]) for line in lines if line[0].partition("{")[0] == name)

    def _polls(self) -> Iterator[None]:
        """Yield for an attempt every `POLL_S`, until the loop is left.

        Raises:
            ServerFailed: The process has ended, or takes too long.
        """
        while True:
            yield
            if self.process.poll() is not None:
                raise ServerFailed(f"the server ended with code {self.process.returncode}:\n{self._last_words()}")
            if self.age_s() > self._start_timeout_s:
                raise ServerFailed(f"the server is not up after {self._start_timeout_s:g} s:\n{self._last_words()}")
            time.sleep(POLL_S)

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


@contextmanager
def serving(
    command: Sequence[str],
    *,
    folder: Path = ROOT,
    variables: Mapping[str, str] | None = None,
    without: Collection[str] = (),
    start_timeout_s: float = START_TIMEOUT_S,
) -> Iterator[Server]:
    """Start a server on a free port of 127.0.0.1; at the end of the block it is terminated, then killed.

    Args:
        command: Command, to which `--port` is appended. Its output goes to a file.
        folder: Working directory.
        variables: Additional environment variables.
        without: Environment variables of this process that it does not get.
        start_timeout_s: Limit for its start, in seconds.
    """
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="perf-") as scratch:
        log = Path(scratch) / "server.log"
        with log.open("wb") as output:
            started = time.perf_counter()
            process = subprocess.Popen(
                [*command, "--port", str(port)],
                cwd=folder,
                env={name: os.environ[name] for name in os.environ.keys() - set(without)} | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # so that Ctrl-C reaches this process only, which stops the server
            )
        try:
            yield Server(process, port, log, started, start_timeout_s)
        finally:
            _stop(process)


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants that still run."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _stop(process: subprocess.Popen[bytes]) -> None:
    descendants = family(process.pid)[1:]  # before it ends, because orphans have another parent
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(descendants, timeout=STOP_TIMEOUT_S)
    for descendant in left:
        with suppress(psutil.NoSuchProcess):
            descendant.kill()
    psutil.wait_procs(left, timeout=STOP_TIMEOUT_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
