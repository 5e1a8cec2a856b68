"""Answers to bytes that are no valid HTTP/1.1 request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from staged_pool.api import status
from staged_pool.api.status import ErrorKind, Problem

_MALFORMED: Final = (
    status.BAD_FRAMING,
    "The request is not valid HTTP/1.1: expected a request line, headers that each end in CRLF, one Host header, and a "
    "body with one Content-Length or well-formed chunks",
)
_NO_REQUEST: Final[Mapping[int, tuple[ErrorKind, str]]] = {
    431: (status.HEADERS_TOO_LARGE, "The head of the request is larger than this server reads"),
    501: (status.UNSUPPORTED_FRAMING, "Transfer-Encoding is not supported; expected chunked, or a Content-Length"),
}


def problem_of(hint: int) -> Problem:
    """Return the problem for h11's error status. Its own message may repeat bytes of the client."""
    kind, message = _NO_REQUEST.get(hint, _MALFORMED)
    return Problem(kind=kind, message=message)
