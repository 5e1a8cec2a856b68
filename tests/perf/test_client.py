"""The client reads answers with a length and in chunks, however they are cut."""

from __future__ import annotations

import socket
import threading

import pytest

from perf.tools.client import Connection, get

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nsome\r\n6;x=y\r\n words\r\n0\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nsome words"
ENDLESS = b"HTTP/1.1 200 OK\r\n\r\nsome words"


def answered(answer: bytes, cut: int) -> bytes:
    """The body that the client reads of an answer that arrives in two pieces."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = Connection(listener.getsockname()[1], timeout_s=10)
        server, _ = listener.accept()
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        read_some = threading.Event()

        def send() -> None:
            server.sendall(answer[:cut])
            read_some.wait(10)
            server.sendall(answer[cut:])

        thread = threading.Thread(target=send)
        thread.start()
        try:
            connection.send(get("/"))
            reply = connection.receive()
            read_some.set()
            while reply is None:
                reply = connection.receive()
            return reply.body
        finally:
            read_some.set()
            thread.join()
            server.close()
            connection.close()


@pytest.mark.parametrize("answer", [CHUNKED, SIZED], ids=["chunked", "sized"])
def test_an_answer_is_whole_wherever_it_is_cut(answer: bytes) -> None:
    assert {answered(answer, cut) for cut in range(1, len(answer))} == {b"some words"}


def test_an_answer_without_an_end_is_an_error() -> None:
    with pytest.raises(ConnectionError, match="no Content-Length"):
        answered(ENDLESS, len(ENDLESS))
