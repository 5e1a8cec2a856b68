"""A server in a process of its own, and blocking clients."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from staged_pool.api.http.listener import bind
from tests.api.serving import post, statuses
from tests.chaos.program import Scenario

ROOT: Final = Path(__file__).parents[2]
WAIT_TIMEOUT_S: Final = 20.0
"""Timeout in seconds for steps that are quick on any working machine."""


class Child:
    """A server process and its blocking clients."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, gate: Path, stack: ExitStack) -> None:
        self.process = process
        self.gate = gate
        self._port = port
        self._stack = stack

    def connect(self) -> socket.socket:
        stream = self._stack.enter_context(socket.create_connection(("127.0.0.1", self._port), timeout=WAIT_TIMEOUT_S))
        stream.settimeout(WAIT_TIMEOUT_S)
        return stream

    def send(self, text: str, *headers: str) -> socket.socket:
        """Send a request, and return the connection, whose answer is unread."""
        stream = self.connect()
        stream.sendall(post(json.dumps({"input": text}).encode(), "connection: close", *headers))
        return stream

    def get(self, path: str) -> tuple[int, Any]:
        stream = self.connect()
        stream.sendall(f"GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n".encode())
        return answer(stream)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        latest = time.monotonic() + WAIT_TIMEOUT_S
        while not condition():
            assert time.monotonic() < latest, "it never came"
            time.sleep(0.005)

    def wait_ready(self, status: int = 200) -> None:
        self.wait_until(lambda: self.get("/ready")[0] == status)

    def wait_in_flight(self, requests: int) -> None:
        self.wait_until(lambda: bool(self.get("/stages")[1]["models"]["letters"]["admission"]["requests"] == requests))

    def open_gate(self) -> None:
        self.gate.touch()

    def exit_code(self) -> int:
        return self.process.wait(WAIT_TIMEOUT_S)

    def serves(self) -> bool:
        with suppress(OSError, ValueError):
            return self.get("/health")[0] == 200
        return False

    def assert_serves(self) -> None:
        assert answer(self.send("alive"))[0] == 200
        self.wait_in_flight(0)


def answer(stream: socket.socket) -> tuple[int, Any]:
    """Status and content of the one answer that comes before the connection closes."""
    received = b""
    with stream:
        while data := stream.recv(2**16):
            received += data
    _, _, body = received.partition(b"\r\n\r\n")
    [status] = statuses(received)
    return status, json.loads(body) if body.startswith(b"{") else body


@contextmanager
def child(scenario: Scenario, backend: str, folder: Path, stderr: Any = None) -> Iterator[Child]:
    gate = folder / "gate"
    with ExitStack() as stack:
        log = stderr or stack.enter_context((folder / "log").open("wb"))
        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            descriptor = listener.fileno()
            command = [sys.executable, "-m", "tests.chaos.program", scenario, backend, str(descriptor), str(gate)]
            process = subprocess.Popen(command, cwd=ROOT, stderr=log, pass_fds=[descriptor])
        with process:
            try:
                yield Child(process, port, gate, stack)
            finally:
                process.kill()
