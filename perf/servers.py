"""Start a server as a process of its own, wait until it is there, and end it again with all that it has started."""

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

from perf.client import Connection, Reply, get
from staged_pool.runtime.config import DType, EngineConfig
from staged_pool.runtime.threads.openmp import VARIABLES, spin_briefly

ROOT: Final = Path(__file__).resolve().parent.parent

START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 5.0
POLL_S: Final = 0.005

Backend = Literal["asyncio", "trio"]

MAX_CONNECTIONS: Final = 2000
"""Of a load that does not wait for answers. Where a request takes the device a millisecond or less, those that a
second's wait has room for are more than the thousand that a server takes by itself."""

_SPARE_CONNECTIONS: Final = 100
"""For health checks."""

PREPARED: Final = (*VARIABLES, "TOKENIZERS_PARALLELISM")
"""Of the environment: what `prepare_libraries` sets."""


def prepare_libraries() -> None:
    """Have the libraries of this process do as `staged-pool serve` has its own: what is compared must not differ in
    that. Call it before torch is imported."""
    spin_briefly()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured. The same values go to the server, to the library and to the bare model."""

    model: str | None = None
    device: str = "auto"
    dtype: DType = "auto"
    torch_threads: int | None = None
    backend: Backend = "asyncio"

    def engine_config(self) -> EngineConfig:
        return EngineConfig(model=self.model, device=self.device, dtype=self.dtype, torch_threads=self.torch_threads)

    def serve_command(self, *, coalesce: bool = False) -> list[str]:
        """`staged-pool serve`, with all other settings at their defaults; the port is not in it.

        Args:
            coalesce: As is the default of a server. Without it every input goes through the device: those who send the
                same ones again and again, several at once, measure that, and not how many of them were alike.
        """
        command = [str(Path(sys.executable).parent / "staged-pool"), "serve"]
        if not coalesce:
            command.append("--no-coalesce")
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None:
                command += [f"--{field.name.replace('_', '-')}", str(value)]
        return command


@dataclass(frozen=True, slots=True)
class Card:
    """What `/ready` says about the model that is served; the fields that a comparison depends on."""

    name: str
    dtype: str
    torch_threads: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class _Ready:
    models: tuple[Card, ...]


def overload_flags(target_delay_s: float) -> tuple[str, ...]:
    """What `staged-pool serve` is started with for more than it can do: it refuses what would wait for longer, and no
    connection."""
    connections = MAX_CONNECTIONS + _SPARE_CONNECTIONS
    return "--target-delay", f"{target_delay_s:g}", "--max-connections", str(connections)


class ServerFailed(RuntimeError):
    """A server did not start."""


class Server:
    """One server process. Made by `serving`."""

    def __init__(
        self, process: subprocess.Popen[bytes], port: int, log: Path, started: float, start_timeout_s: float
    ) -> None:
        self.process = process
        self.port = port
        self._log = log
        self._started = started
        self._start_timeout_s = start_timeout_s

    def age_s(self) -> float:
        """Seconds since just before the process was made."""
        return time.perf_counter() - self._started

    def wait_listening(self) -> None:
        """Wait until the port accepts a connection."""
        for _ in self._polls():
            with suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", self.port), timeout=START_TIMEOUT_S).close()
                return

    def wait_ok(self, path: str) -> Reply:
        """Wait until a GET of `path` is answered 200, and return that answer."""
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
        """Send a request until it is answered 200, and return that answer; a server may hang up meanwhile.

        Raises:
            ServerFailed: It will not be answered: the server says that the request is wrong.
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
                    raise ServerFailed(f"the server refuses the request with {reply.status}: {words}")
        raise AssertionError("polls end only by raising")

    def card(self) -> Card:
        """What the model is that is served; waits until it is ready."""
        return msgspec.json.decode(self.wait_ok("/ready").body, type=_Ready).models[0]

    def gauges(self, *names: str) -> dict[str, float]:
        """Values of `/metrics` of the served model; one that the server does not have is left out."""
        lines = (line.split() for line in self.wait_ok("/metrics").body.decode().splitlines())
        values = {line[0].partition("{")[0]: float(line[-1]) for line in lines if not line[0].startswith("#")}
        return {name: values[name] for name in names if name in values}

    def total(self, name: str) -> float:
        """A counter of `/metrics`, whatever its labels are; 0: the server does not have it."""
        lines = (line.split() for line in self.wait_ok("/metrics").body.decode().splitlines())
        return sum(float(line[-1]) for line in lines if line[0].partition("{")[0] == name)

    def _polls(self) -> Iterator[None]:
        """Until the loop is left, one more attempt every few milliseconds.

        Raises:
            ServerFailed: The process has ended, or takes too long.
        """
        while True:
            yield
            if self.process.poll() is not None:
                raise ServerFailed(f"the server ended with code {self.process.returncode}:\n{self._last_words()}")
            if self.age_s() > self._start_timeout_s:
                raise ServerFailed(f"the server is not there after {self._start_timeout_s:g} s:\n{self._last_words()}")
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
    """Start a server on a free port of 127.0.0.1; at the end of the block it is told to stop, then made to.

    Args:
        command: Takes `--port` at its end. What it says goes to a file.
        folder: Where it runs.
        variables: Of its environment, beside those of this process.
        without: Of those of this process, which it is not to have.
        start_timeout_s: How long it is waited for.
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
                start_new_session=True,  # a Ctrl-C at the terminal reaches us only; we end the server by its id
            )
        try:
            yield Server(process, port, log, started, start_timeout_s)
        finally:
            _stop(process)


def family(pid: int) -> list[psutil.Process]:
    """A process and all that it has started, as far as they still run."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _stop(process: subprocess.Popen[bytes]) -> None:
    descendants = family(process.pid)[1:]  # before it ends: afterwards nobody knows whose they were
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
