"""The clients of a load, before a server that does not keep its connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from perf.tools import load as load_module
from perf.tools.client import get
from perf.tools.load import Load, LoadGenerator

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@pytest.fixture
def port() -> Iterator[int]:
    """Port of a server that answers a connection's second request by closing it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = [threading.Thread(target=_serve, args=(listener,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


def _serve(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            if connection.recv(4096):
                connection.sendall(ANSWER)
                connection.recv(4096)


def test_a_client_whose_connection_is_closed_counts_it_and_comes_back(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "FAILED_PAUSE_S", 0.0)
    with closing(LoadGenerator(port, (get("/"),))) as generate:
        outcome = generate(Load(clients=2, max_requests=10, seconds=60, patience_s=60, strict=False))
    assert len(outcome.latencies_ms) + outcome.failed == 10
    assert outcome.failed >= 4, "every second request of each of the two"
    assert outcome.unanswered == 0


def test_of_a_strict_load_it_is_the_end(port: int) -> None:
    with closing(LoadGenerator(port, (get("/"),))) as generate, pytest.raises(ConnectionError):
        generate(Load(clients=1, max_requests=2, seconds=60))


def test_a_client_that_rests_for_longer_than_the_load_sends_once(port: int) -> None:
    with closing(LoadGenerator(port, (get("/"),))) as generate:
        outcome = generate(Load(clients=1, max_requests=2, seconds=60, pause_s=61))
    assert len(outcome.latencies_ms) == 1


def _reject(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        while connection.recv(4096):
            connection.sendall(b"HTTP/1.1 429 Full\r\nretry-after: 61\r\ncontent-length: 2\r\n\r\nno")


@pytest.mark.parametrize(("heeds_429", "sent"), [(True, 1), (False, 3)])
def test_a_client_that_does_not_heed_a_429_comes_back_at_once(heeds_429: bool, sent: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=_reject, args=(listener,))
        server.start()
        with closing(LoadGenerator(listener.getsockname()[1], (get("/"),))) as generate:
            outcome = generate(Load(clients=1, max_requests=3, seconds=60, heeds_429=heeds_429))
        server.join()
    assert outcome.rejected == sent
