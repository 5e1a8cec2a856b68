"""Signals and lowered limits on a running server: it goes on, and does delayed work later."""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.child import Child, answer, child
from tests.servers.byte_client import post

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and sets limits of another process")

STOPPED_S = 1.2
LESS_S = "0.8"
SPARE_BYTES = 2**26
LITTLE_BYTES = 2**23
"""Room for what small requests allocate, and too little for `ALLOCATED_BYTES`."""


STACKS = 20
"""Signals that are answered with stacks, while other threads run."""


@pytest.fixture(params=["asyncio", "uvloop", "trio"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Child]:
    with child("plain", str(request.param), tmp_path) as started:
        started.wait_ready()
        yield started


@pytest.fixture
def any_server(tmp_path: Path) -> Iterator[Child]:
    """A server on any event loop: it makes no difference here."""
    with child("plain", "asyncio", tmp_path) as started:
        started.wait_ready()
        yield started


def outcome(stream: socket.socket) -> int | None:
    """Status of the answer; None: the connection was closed without one."""
    try:
        return answer(stream)[0]
    except (OSError, ValueError):
        return None


@contextmanager
def limited(server: Child, limit: int, value: int) -> Iterator[None]:
    """Hold the process to a limit during the block."""
    _, hard = before = resource.prlimit(server.process.pid, limit)
    resource.prlimit(server.process.pid, limit, (value, hard))
    try:
        yield
    finally:
        resource.prlimit(server.process.pid, limit, before)


def test_row_55_a_stop_under_load_loses_no_connection(server: Child) -> None:
    patient = [server.send("hold") for _ in range(8)]
    hurried = [server.send("hold", f"x-request-timeout: {LESS_S}") for _ in range(8)]
    server.wait_until(lambda: bool(server.admission["admitted"] == 16))
    request = post(json.dumps({"input": "half"}).encode(), "connection: close")
    halves = [server.connect() for _ in range(8)]
    for stream in halves:
        stream.sendall(request[:40])
    server.process.send_signal(signal.SIGSTOP)
    late = [server.send("late") for _ in range(8)]  # the kernel accepts them
    time.sleep(STOPPED_S)  # the process is stopped meanwhile
    server.process.send_signal(signal.SIGCONT)
    assert [answer(stream)[0] for stream in hurried] == [504] * 8
    server.open_gate()
    for stream in halves:
        stream.sendall(request[40:])
    assert [answer(stream)[0] for stream in (*patient, *late, *halves)] == [200] * 24
    server.assert_serves()


def test_row_56_a_server_that_may_open_nothing_more_lives_until_it_may(server: Child) -> None:
    kept = server.connect()
    kept.sendall(b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n")
    assert kept.recv(2**16).startswith(b"HTTP/1.1 200")
    busy = server.send("hold")
    server.wait_in_flight(1)
    with limited(server, resource.RLIMIT_NOFILE, server.open_files):
        late = [server.send("late") for _ in range(4)]
        server.open_gate()
        assert answer(busy)[0] == 200
    assert {outcome(stream) for stream in late} <= {200, None}, "answered, or closed to make room for the next"
    server.assert_serves()
    assert server.log.count("\n") < 1000


def test_row_50_memory_that_is_forbidden_while_it_serves_costs_the_request_that_needs_it(any_server: Child) -> None:
    any_server.assert_serves()
    with limited(any_server, resource.RLIMIT_AS, any_server.mapped_bytes + SPARE_BYTES):
        status, body = answer(any_server.send("allocate"))
        assert status == 503, body
        assert "no memory for this request" in body["error"]["message"]
        any_server.assert_serves()
    any_server.wait_until(lambda: '"memory.exhausted"' in any_server.log)
    assert answer(any_server.send("allocate"))[0] == 200
    any_server.assert_serves()


def test_row_50_a_server_that_may_map_little_more_lives_until_it_may(server: Child) -> None:
    server.assert_serves()
    outcomes: set[int | None] = set()
    with limited(server, resource.RLIMIT_AS, server.mapped_bytes + LITTLE_BYTES):
        for length in (10**2, 10**5, 10**6, 10**7, 2 * 10**7) * 4:
            try:
                stream = server.send("a" * length)
            except ConnectionError:
                outcomes.add(None)  # before it had the whole request
            else:
                outcomes.add(outcome(stream))
    assert outcomes <= {200, 400, 413, 503, None}
    server.assert_serves()
    assert "crashed" not in server.log


def test_row_54_signals_that_ask_for_nothing_or_for_stacks_end_nothing(server: Child) -> None:
    server.process.send_signal(signal.SIGPIPE)
    server.process.send_signal(signal.SIGUSR2)
    held = server.send("hold")
    server.wait_in_flight(1)
    before = server.log.count("in preprocess")

    def is_told() -> bool:
        server.process.send_signal(signal.SIGUSR1)  # it may come before the thread does
        return server.log.count("in preprocess") > before + STACKS

    server.wait_until(is_told)
    server.open_gate()
    assert answer(held)[0] == 200
    server.assert_serves()


def test_row_54_a_terminal_that_is_closed_ends_it_after_what_is_inside(any_server: Child) -> None:
    held = any_server.send("hold")
    any_server.wait_in_flight(1)
    any_server.process.send_signal(signal.SIGHUP)
    any_server.wait_ready(503)
    any_server.open_gate()
    assert answer(held)[0] == 200
    assert any_server.exit_code() == 0


def test_row_54_a_server_that_was_told_to_outlive_its_terminal_does(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does; a child inherits it
    try:
        with child("plain", "asyncio", tmp_path, inherits=True) as server:
            server.wait_ready()
            server.process.send_signal(signal.SIGHUP)
            server.assert_serves()
            assert server.ask("/ready")[0] == 200
    finally:
        signal.signal(signal.SIGHUP, before)
