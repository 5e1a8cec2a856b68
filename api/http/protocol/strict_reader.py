"""Strict HTTP/1.1 reader, based on h11, against request smuggling.

It rejects bytes that a proxy in front may read as another request, by the rules of RFC 9110 and RFC 9112 where h11 is
lenient. Both paths through the server read heads with it, so that both reject the same.
"""

from __future__ import annotations

import re
from typing import Any, Final

import h11

from staged_pool.api import status
from staged_pool.api.status import ErrorKind, Problem

MAX_EMPTY_LINES: Final = 8
"""Maximum empty lines before a request (RFC 9112, section 2.2)."""

HEAD_END: Final = b"\r\n\r\n"

METHODS: Final = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE"})
"""Methods that are answered, if only with 405; others are answered 501."""

_PREFACE: Final = b"PRI * HTTP/2.0"
"""First line of HTTP/2 with prior knowledge, which `Http1` looks for."""

_LENIENT: Final = re.compile(rb"(?<!\r)\n|\n[ \t]|\r(?!\n|$)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Bytes that h11 accepts and this reader does not: a bare LF or CR, obs-fold, control characters."""

_VERSION: Final = re.compile(rb"HTTP/[0-9]\.[0-9]")
_TARGET: Final = re.compile(rb"(?:/|[A-Za-z][A-Za-z0-9+.-]*://[^/?#@\\]++)[^#\x7f-\xff]*")
"""Target in origin or absolute form (RFC 9112, section 3.2); `*` is for OPTIONS alone, and CONNECT is not served.

The host is possessive: what follows may have the same characters, and a wrong target would be tried at each of them.
"""

_HOST: Final = re.compile(rb"(?:[A-Za-z0-9._~%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")
_ONE_LENGTH: Final = re.compile(rb"[0-9]{1,20}")

_CHUNK: Final = re.compile(rb"(?P<size>[0-9A-Fa-f]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?\r\n")

_KNOWN_METHODS: Final = f"The method is not known; expected one of {b', '.join(sorted(METHODS)).decode()}, in capitals"
_NO_CHUNK: Final = (
    "The first line of a chunk is not valid; expected well-formed chunks: a size of at most 16 hexadecimal digits, "
    "and CRLF"
)
_NO_TRAILER: Final = "The trailers are not valid; expected CRLF behind the last chunk, or headers that each end in CRLF"


class MalformedRequest(h11.RemoteProtocolError):
    """Error of a malformed request.

    Args:
        message: The error, and what was expected; never bytes of the client.
        kind: The status and type of the answer.
    """

    def __init__(self, message: str, kind: ErrorKind = status.BAD_FRAMING) -> None:
        super().__init__(message, error_status_hint=kind.status)
        self.problem = Problem(kind=kind, message=message)


class StrictReader(h11.Connection):
    """An h11 connection that rejects bytes which a proxy in front may read differently.

    It never pauses: bytes behind a request stay in it until the next cycle begins. Bytes behind the last request of a
    connection are dropped (RFC 9112, section 9.6).

    Args:
        max_head_bytes: Maximum bytes of an incomplete head, or of a chunk's first line; more are answered 431.
        max_chunk_bytes: Maximum bytes that one chunk of a body may announce; more are answered 413.
    """

    is_kept = False
    """True for an HTTP/1.0 request with `Connection: keep-alive` (RFC 9112, section C.2.2)."""

    asks_head_only = False
    """True for a HEAD request: the answer has no body, not even for an error."""

    has_more = False
    """True if a new cycle has begun with unread bytes."""

    problem: Problem | None = None
    """The error that this class has found; None for one of h11."""

    def __init__(self, max_head_bytes: int, max_chunk_bytes: int = 2**31) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=max_head_bytes)
        self._max_chunk_bytes = max_chunk_bytes
        self._empty_lines = 0
        self._looked_at = 0
        """Bytes of an incomplete head that are already checked."""

    @property
    def waiting(self) -> bytes:
        """Bytes that were received and not read."""
        data: bytes = self.trailing_data[0]
        return data

    def receive_data(self, data: bytes) -> None:
        if self.their_state is not h11.MUST_CLOSE:
            super().receive_data(data)

    def start_next_cycle(self) -> None:
        super().start_next_cycle()
        self.has_more = bool(self._receive_buffer)
        self._empty_lines = self._looked_at = 0
        self.asks_head_only = False

    def next_event(self) -> Any:
        if self.their_state is h11.MUST_CLOSE:
            return h11.NEED_DATA
        try:
            if self.their_state is h11.IDLE and not self._begins():
                return h11.NEED_DATA
            event = super().next_event()
        except MalformedRequest as error:
            self.problem = error.problem
            if not self._is_answering:
                raise
            return h11.NEED_DATA
        except h11.RemoteProtocolError:
            if not self._is_answering:
                raise
            return h11.NEED_DATA
        if isinstance(event, h11.Request):
            self.is_kept = _keeps_http10(event)
            self.asks_head_only = event.method == b"HEAD"
            if self.is_kept:
                self._cstate.keep_alive = True  # h11 always closes a connection of HTTP/1.0
            if b"transfer-encoding" in dict(event.headers):
                self._reader = _ChunkedBody(self._max_chunk_bytes)
        return h11.NEED_DATA if event is h11.PAUSED else event

    @property
    def _is_answering(self) -> bool:
        """True once an answer has begun, for instance a rejection; errors in the body are then ignored."""
        return self.our_state is h11.SEND_BODY

    def _begins(self) -> bool:
        """Skip empty lines, and check the received part of a head; False: no head has begun.

        Raises:
            MalformedRequest: The head breaks a rule.
        """
        buffer = self._receive_buffer
        data: bytearray = buffer._data
        while data[:2] == b"\r\n":
            self._empty_lines += 1
            if self._empty_lines > MAX_EMPTY_LINES:
                raise MalformedRequest(f"More than {MAX_EMPTY_LINES} empty lines before the request; expected none")
            buffer.maybe_extract_at_most(2)
        if not data or data == b"\r":
            return False
        begin = max(0, self._looked_at - len(HEAD_END))
        end = data.find(HEAD_END, begin)
        if _LENIENT.search(data, begin, end + 2 if end >= 0 else len(data)):
            raise MalformedRequest(
                "A line of the head ends in CR or LF alone, is continued in the next line, or has a control character; "
                "expected lines that each end in CRLF"
            )
        self._looked_at = len(data)
        if end >= 0:
            check_head(bytes(data[:end]))
        return True


def check_head(head: bytes) -> None:
    """Check a complete head, given without the empty line at its end.

    Rules that h11 itself enforces, such as the names of headers, are left to it.

    Raises:
        MalformedRequest: The head breaks a rule.
    """
    first, *lines = head.split(b"\r\n")
    if first != _PREFACE:
        _check_first(first)
    is_old = first.endswith(b"/1.0")
    lengths, is_coded = 0, False
    for line in lines:
        name, _, value = line.partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        if name == b"host" and not _HOST.fullmatch(value):
            raise MalformedRequest("Host is not valid; expected a name or an address, with an optional :port")
        if name == b"content-length":
            lengths += 1
            if lengths > 1 or not _ONE_LENGTH.fullmatch(value):
                raise MalformedRequest("Content-Length is not valid; expected one header with one decimal number")
        if name == b"transfer-encoding":
            if is_old:  # RFC 9112, section 6.1
                raise MalformedRequest("HTTP/1.0 has no Transfer-Encoding; expected a Content-Length, or HTTP/1.1")
            is_coded = True
    if is_coded and lengths:  # both together allow request smuggling
        raise MalformedRequest("Transfer-Encoding and Content-Length exclude each other; expected one of them")


def _check_first(line: bytes) -> None:
    parts = line.split(b" ")
    if len(parts) != 3 or not _VERSION.fullmatch(parts[2]):
        raise MalformedRequest(
            "The request line is not valid HTTP/1.1; expected a method, a target and HTTP/1.1, separated by one space"
        )
    method, target, spoken = parts
    if spoken not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise MalformedRequest(
            "The HTTP version is not supported; expected HTTP/1.1 or HTTP/1.0", status.UNSUPPORTED_VERSION
        )
    if method not in METHODS:
        raise MalformedRequest(_KNOWN_METHODS, status.UNKNOWN_METHOD)
    if not (_TARGET.fullmatch(target) or (target == b"*" and method == b"OPTIONS")):
        raise MalformedRequest("The target of the request is not valid; expected a path that begins with /, or a URL")


class _ChunkedBody:
    """Reader of a chunked body (RFC 9112, section 7.1), which replaces h11's.

    Args:
        most: Maximum bytes of a chunk.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = 0
        """Unread bytes of the chunk."""
        self._at_end = False
        """The chunk is read, but not the CRLF behind it."""
        self._in_trailers = False

    def __call__(self, buffer: Any) -> h11.Data | h11.EndOfMessage | None:
        if self._at_end:
            if len(buffer) < 2:
                return None
            if buffer.maybe_extract_at_most(2) != b"\r\n":
                raise MalformedRequest("A chunk of the body is longer than its size; expected well-formed chunks")
            self._at_end = False
        if self._left == 0 and not self._in_trailers:
            line = buffer.maybe_extract_next_line()
            if line is None:
                return None
            self._begin(line)
        if self._in_trailers:
            return self._trailers(buffer)
        data = buffer.maybe_extract_at_most(self._left)
        if data is None:
            return None
        self._left -= len(data)
        self._at_end = self._left == 0
        return h11.Data(data=data, chunk_end=self._at_end)

    def _begin(self, line: bytearray) -> None:
        found = _CHUNK.fullmatch(line)
        if found is None:
            raise MalformedRequest(_NO_CHUNK)
        self._left = int(found["size"], 16)
        self._in_trailers = self._left == 0
        if self._left > self._most:
            raise MalformedRequest(
                f"A chunk is larger than this server's limit of {self._most} bytes", status.BODY_TOO_LARGE
            )

    def _trailers(self, buffer: Any) -> h11.EndOfMessage | None:
        """Read the trailers to their end, and drop them: the server uses none."""
        data: bytearray = buffer._data
        if data[:2] != b"\r\n":
            end = data.find(HEAD_END)
            if _LENIENT.search(data, 0, end + 2 if end >= 0 else len(data)):
                raise MalformedRequest(_NO_TRAILER)
            if end < 0:
                return None
        for line in buffer.maybe_extract_lines() or []:
            if b":" not in line:
                raise MalformedRequest(_NO_TRAILER)
        return h11.EndOfMessage()

    def read_eof(self) -> None:
        raise MalformedRequest("The connection closed within a chunked body")


def _keeps_http10(request: h11.Request) -> bool:
    if request.http_version != b"1.0":
        return False
    options = [value.lower() for name, value in request.headers if name == b"connection"]
    return b"keep-alive" in [part.strip() for part in b",".join(options).split(b",")]
