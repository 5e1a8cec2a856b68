"""The accept loop survives the faults of single connections, and each listener runs it."""

from __future__ import annotations

import ast
import errno
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import staged_pool
from staged_pool.api.http.accept_loop import AcceptLoop
from staged_pool.api.http.listener import bind
from tests.support.logs import captured_logs
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@contextmanager
def descriptors(free: int) -> Iterator[None]:
    """Leave this process that many descriptors during the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connecting(address: Any) -> socket.socket:
    """Return a socket that connects to a listener of this machine."""
    client = socket.socket()
    client.setblocking(False)
    client.connect_ex(address)
    return client


async def test_connections_beyond_the_descriptors_wait_until_one_ends() -> None:
    accepted: list[socket.socket] = []

    async def make_room() -> None:
        if accepted:
            accepted.pop(0).close()
        await anyio.lowlevel.checkpoint()

    with ExitStack() as stack:
        listener = stack.enter_context(bind("127.0.0.1", 0))
        clients = [stack.enter_context(connecting(listener.getsockname())) for _ in range(12)]
        loop = AcceptLoop(listener, lambda one, _: accepted.append(one), make_room)
        with captured_logs() as logs, descriptors(free=4):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(loop.run)
                last = clients[-1].getsockname()
                await until(lambda: any(_peer(one) == last for one in accepted))
                tasks.cancel_scope.cancel()
        for one in accepted:
            stack.enter_context(one)
        assert os.strerror(errno.EMFILE) in logs[0]["reason"]


def test_a_flood_of_failed_accepts_is_one_line_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = [0.0, 0.0, 0.5, 0.999, 1.0, 1.5, 2.0]
    monkeypatch.setattr(anyio, "current_time", iter(times_s).__next__)

    class Full(socket.socket):
        def accept(self) -> Any:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with Full() as listener, captured_logs() as logs:
        loop = AcceptLoop(listener, lambda *_: None, anyio.lowlevel.checkpoint)
        for _ in times_s:
            assert not loop.accept_waiting()
    assert [entry["event"] for entry in logs] == ["connection.not_accepted"] * 3
    assert [entry["times"] for entry in logs] == [1, 4, 2]
    assert all(os.strerror(errno.EMFILE) in entry["reason"] for entry in logs)


def _peer(accepted: socket.socket) -> Any:
    return accepted.getpeername()


@pytest.mark.parametrize("error", [errno.ECONNABORTED, errno.EINTR, errno.ENFILE, errno.EPERM, errno.EPROTO])
async def test_no_error_of_one_accept_ends_the_loop(error: int) -> None:
    """The listener raises them: the kernel gives them at moments that no test can choose."""
    accepted: list[socket.socket] = []

    class Failing(socket.socket):
        failures = 3

        def accept(self) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError(error, os.strerror(error))
            return super().accept()

    with bind("127.0.0.1", 0) as bound, Failing(fileno=bound.detach()) as listener:
        listener.setblocking(False)
        with connecting(listener.getsockname()), captured_logs():
            async with anyio.create_task_group() as tasks:
                loop = AcceptLoop(listener, lambda one, _: accepted.append(one), anyio.lowlevel.checkpoint)
                tasks.start_soon(loop.run)
                await until(lambda: bool(accepted))
                tasks.cancel_scope.cancel()
        accepted.pop().close()


async def test_a_connection_that_is_gone_as_it_begins_is_closed_and_the_next_one_begins() -> None:
    begun: list[socket.socket] = []

    def begin(accepted: socket.socket, _: Any) -> None:
        begun.append(accepted)
        if len(begun) == 1:
            raise OSError(errno.EINVAL, "its client is gone")

    with bind("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        with connecting(address), connecting(address):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(AcceptLoop(listener, begin, anyio.lowlevel.checkpoint).run)
                await until(lambda: len(begun) == 2)
                tasks.cancel_scope.cancel()
    first, second = begun
    assert first.fileno() == -1
    second.close()


PACKAGE = Path(staged_pool.__file__).parent
CALLS = {
    "accept", "listen", "create_server", "start_server", "start_unix_server", "create_tcp_listener",
    "create_unix_listener", "create_unix_server", "serve_tcp", "open_tcp_listeners", "sock_accept",
}  # fmt: skip
"""Names of calls that accept connections, or prepare to."""


def callers(names: set[str]) -> set[str]:
    """Return the modules of the package with a call of such a name."""
    found = set()
    for folder in ("stages", "runtime", "api"):
        for file in (PACKAGE / folder).resolve().rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call):
                    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                    if name in names:
                        found.add(str(file.relative_to(PACKAGE.resolve())))
    return found


def test_every_listener_runs_the_one_loop() -> None:
    assert callers(CALLS) - {"runtime/engine/lifecycle.py", "api/limits/server_state.py"} == {
        "api/http/accept_loop.py",  # accepts
        "api/http/listener.py",  # listens
    }, "memory.listen() aside, nothing else may accept"
    assert callers({"AcceptLoop"}) == {"api/http/accept.py", "api/http/token_listener.py"}
    assert callers({"Acceptor"}) == {"api/http/server.py"}
    assert callers({"bind"}) >= {"api/commands/serve.py"}
