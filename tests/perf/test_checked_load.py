"""A load whose right vectors are known: right answers, other vectors, rejections and failures are told apart."""

from __future__ import annotations

import base64

import anyio.from_thread
import msgspec
import numpy as np
import pytest

from perf.tools.checked_load import TOLERANCE, CheckedLoad, Counts, Exchange, requests_of
from perf.tools.client import Reply
from tests.servers.on_socket import serving
from tests.support.model import expected

VECTORS = {"one": np.array([1.0, 0.0], np.float32), "two": np.array([0.0, 1.0], np.float32)}


def reply(*rows: object) -> Reply:
    encoded = [base64.b64encode(np.asarray(row, np.float32).tobytes()).decode() for row in rows]
    return Reply(200, b"HTTP/1.1 200\r\n\r\n", msgspec.json.encode({"data": [{"embedding": row} for row in encoded]}))


def test_an_answer_is_right_only_with_the_vector_of_each_text() -> None:
    request, swapped = requests_of(VECTORS, 2, "/pool")
    assert request.content.startswith(b"POST /pool/v1/embeddings HTTP/1.1\r\n")
    assert request.content.endswith(b'{"input":["one","two"],"encoding_format":"base64"}')
    assert np.array_equal(request.vectors, swapped.vectors[::-1])
    assert request.is_answered_by(reply(VECTORS["one"] + TOLERANCE / 2, VECTORS["two"]))
    for rows in ([VECTORS["two"], VECTORS["one"]], [VECTORS["one"]], [], [[1.0], [0.0]]):
        assert not request.is_answered_by(reply(*rows))


def exchange(status: int | None, *, is_right: bool = False, note: str = "", may_retry: bool = False) -> Exchange:
    return Exchange(1.0, 1.5, 2.0, status, is_right, note, may_retry)


def test_a_rejection_needs_retry_after_and_anything_else_is_a_failure() -> None:
    others = [exchange(status) for status in (429, 503, 500, 503)]
    lost = exchange(None, note="ConnectionResetError: [Errno 104] Connection reset by peer")
    counts = Counts.of([exchange(200, is_right=True), exchange(200), exchange(429, may_retry=True), *others, lost])
    assert (counts.answers, counts.wrong, counts.rejected, counts.times_s) == (1, 1, 1, [1.0])
    assert dict(counts.failed) == {"429": 1, "503": 2, "500": 1, "ConnectionResetError": 1}
    assert counts.asked == 8


def test_a_load_counts_wrong_vectors_and_other_statuses() -> None:
    vectors = {"abc": expected("abc"), "abd": expected("abc"), "": expected("abc"), "xy": expected("xy")}
    with anyio.from_thread.start_blocking_portal() as portal, portal.wrap_async_context_manager(serving()) as served:
        with CheckedLoad(served.port, vectors, clients=8, rate=10_000, least=400) as load:
            pass
    counts = load.counts
    assert (load.sent, counts.answers, counts.wrong, dict(counts.failed)) == (400, 200, 100, {"400": 100})
    assert len(counts.times_s) == 200
    assert "400" in load.notes()[0]
    assert load.seconds > 0


def test_a_load_needs_a_server(free_tcp_port: int) -> None:
    with pytest.raises(RuntimeError, match="a client failed"):
        with CheckedLoad(free_tcp_port, {"a": expected("a")}, clients=2, least=1):
            pass
