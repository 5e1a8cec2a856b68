"""Answers whose vectors are known: a right one, another vector, a rejection and a failure are told apart."""

from __future__ import annotations

import msgspec
import numpy as np

from perf.tools.checked_load import TOLERANCE, Counts, count, requests_of
from perf.tools.client import Reply

VECTORS = {"one": np.array([1.0, 0.0], np.float32), "two": np.array([0.0, 1.0], np.float32)}


def reply(status: int, *rows: object, head: bytes = b"") -> Reply:
    body = msgspec.json.encode({"data": [{"embedding": np.asarray(row).tolist()} for row in rows]})
    return Reply(status, b"HTTP/1.1 %d\r\n%b\r\n\r\n" % (status, head), body)


def test_an_answer_is_right_only_with_the_vector_of_each_text() -> None:
    [(body, expected), (_, swapped)] = requests_of(VECTORS, 2, "/pool")
    assert body.startswith(b"POST /pool/v1/embeddings HTTP/1.1\r\n")
    assert body.endswith(b'{"input":["one","two"]}')
    assert np.array_equal(expected, swapped[::-1])
    counts = Counts()
    close = VECTORS["one"] + TOLERANCE / 2
    count(reply(200, close, VECTORS["two"]), expected, 0.5, counts)
    assert (counts.answers, counts.wrong, counts.times_s) == (1, 0, [0.5])
    for rows in ([VECTORS["two"], VECTORS["one"]], [VECTORS["one"]], []):
        count(reply(200, *rows), expected, 0.5, counts)
    assert (counts.answers, counts.wrong) == (1, 3)


def test_a_rejection_needs_retry_after_and_anything_else_is_a_failure() -> None:
    [(_, expected), _] = requests_of(VECTORS, 1)
    counts = Counts()
    count(reply(429, head=b"\r\nRetry-After: 2"), expected, 0.1, counts)
    assert (counts.rejected, dict(counts.failed)) == (1, {})
    for status in (429, 503, 500, 503):
        count(reply(status), expected, 0.1, counts)
    assert dict(counts.failed) == {"429": 1, "503": 2, "500": 1}
    assert (counts + counts).asked == 10
