"""The server of `tests.chaos.program` in a process of its own, and the requests to it."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

from staged_pool.api.http.listener import bind
from tests.chaos.program import Scenario
from tests.servers.byte_client import post, statuses
from tests.servers.process import ServerProcess


class Child(ServerProcess):
    """A server process whose model holds some requests at a gate."""

    gate: Path

    def send(self, text: str, *headers: str) -> socket.socket:
        """Send a request, and return the connection, whose answer is unread."""
        stream = self.connect()
        stream.sendall(post(json.dumps({"input": text}).encode(), "connection: close", *headers))
        return stream

    def wait_in_flight(self, requests: int) -> None:
        self.wait_until(lambda: bool(self.admission["requests"] == requests))

    @property
    def admission(self) -> dict[str, Any]:
        """Counts of its admission."""
        found: dict[str, Any] = self.ask("/stages")[1]["models"]["letters"]["admission"]
        return found

    def open_gate(self) -> None:
        self.gate.touch()

    def serves(self) -> bool:
        with suppress(OSError, HTTPException):
            return self.ask("/health")[0] == 200
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
def child(
    scenario: Scenario, backend: str, folder: Path, stderr: IO[bytes] | int | None = None, *, inherits: bool = False
) -> Iterator[Child]:
    """Run a server on a socket that is bound here: its port is known, though nobody may be able to read its log.

    Args:
        inherits: It has this process's handlers of signals.
    """
    with bind("127.0.0.1", 0) as listener:
        descriptor, port = listener.fileno(), listener.getsockname()[1]
        gate = folder / "gate"
        command = [sys.executable, "-m", "tests.chaos.program", scenario, backend, str(descriptor), str(gate)]
        log = folder / "log" if stderr is None else stderr
        server = Child(command, log, port=port, pass_fds=[descriptor], preloads=None if inherits else "server")
    server.gate = gate
    with server:
        yield server
