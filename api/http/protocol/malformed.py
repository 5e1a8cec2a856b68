"""Answers to bytes that HTTP/1.1 makes no request of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from staged_pool.api import status
from staged_pool.api.status import Problem, Row

_MALFORMED: Final = (
    status.BAD_FRAMING,
    "The request is not valid HTTP/1.1: expected a request line, headers that each end in CRLF, with one Host, and a "
    "body of one Content-Length or of well-formed chunks",
)
_NO_REQUEST: Final[Mapping[int, tuple[Row, str]]] = {
    431: (status.HEADERS_TOO_LARGE, "The head of the request is larger than this server reads"),
    501: (status.UNSUPPORTED_FRAMING, "Transfer-Encoding: only chunked is read; expected it, or a Content-Length"),
}


def problem_of(hint: int) -> Problem:
    """The problem that h11 hints at with a status. Its own words would repeat what the client sent."""
    row, message = _NO_REQUEST.get(hint, _MALFORMED)
    return Problem(row=row, message=message)
