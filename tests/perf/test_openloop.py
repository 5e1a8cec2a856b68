"""An open loop whose connections are all taken."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

import pytest

from perf.tools import openloop
from perf.tools.client import get
from perf.tools.openloop import Arrivals, OpenLoop

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def test_a_probe_waits_for_a_connection_if_all_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()
    send = openloop._Run._send

    def seen(run: openloop._Run, due: float, *, probe: bool) -> None:
        send(run, due, probe=probe)
        if probe:
            tried.set()

    def serve() -> None:
        with listener.accept()[0] as connection:
            connection.recv(4096)
            tried.wait()  # the load has ended by then
            connection.sendall(ANSWER)
            connection.recv(4096)
            connection.sendall(ANSWER)

    monkeypatch.setattr(openloop._Run, "_send", seen)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve)
        server.start()
        arrivals = Arrivals(
            rate=20.0, seconds=0.1, seed=0, timeout_s=60.0, max_connections=1, recovered_ms=60_000.0, give_up_s=60.0
        )
        with closing(OpenLoop(listener.getsockname()[1], (get("/"),))) as offer:
            outcome = offer(arrivals)
        server.join()
    assert (outcome.offered, len(outcome.accepted_ms), outcome.not_sent) == (2, 1, 1)
    assert outcome.recovered_s is not None
