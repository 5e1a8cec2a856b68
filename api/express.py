"""Refuse what has no key, or comes while the server is overloaded, before any machinery of HTTP starts.

A refusal the usual way costs a quarter of a millisecond, and on a small machine every one of them takes the cores, and
the interpreter, from the forwards that run: with ten times as many requests as can be answered, a third of the answers
would be lost. So a request that lies complete in one piece, on a connection where nothing else goes on, is looked at
here first, at the cost of reading it. Anything unusual about it is left to the usual way, which gives the same refusal.
"""

from __future__ import annotations

import re
from email.utils import formatdate
from typing import Final

from staged_pool.api.app import Application
from staged_pool.api.config import ServerConfig
from staged_pool.api.entrance import below

_REQUEST: Final = re.compile(
    rb"POST (?P<path>/[!-$&->@-~]*) HTTP/1\.1\r\n(?P<headers>(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~]*\r\n)+)\r\n"
)
"""A head that can be read in one way only: its path has no escapes and no query."""

_UNUSUAL: Final = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"connection", b"http2-settings", b"origin"})
"""Headers that change where a request ends, what becomes of its connection, or who may read its answer."""

_LENGTH: Final = re.compile(rb"[0-9]{1,10}")


class Express:
    """Looks at what has arrived on a connection that has no request in hand.

    Args:
        application: Knows whether a request may enter or is to be turned away, and logs and counts it.
        config: Requests beyond its limits are left to the usual way.
    """

    def __init__(self, application: Application, config: ServerConfig) -> None:
        self._application = application
        self._config = config

    def refuse(self, data: bytes) -> bytes | None:
        """The refusal of the one complete request that `data` is; None where it is anything else, or may enter."""
        if not data.startswith(b"POST ") or (request := _REQUEST.match(data)) is None:
            return None
        headers = _headers(request["headers"])
        if headers is None or not self._is_usual(headers) or request.end() > self._config.header_limit_bytes:
            return None
        length = _LENGTH.fullmatch(headers.get(b"content-length", b""))
        if length is None or int(length[0]) != len(data) - request.end():
            return None
        scope = {
            "type": "http",
            "method": "POST",
            "path": below(self._config.root_path, request["path"].decode("ascii")),
            "http_version": "1.1",
            "headers": list(headers.items()),
        }
        refusal = self._application.refuse_at_once(scope, int(length[0]))
        if refusal is None:
            return None
        status, answer_headers, body = refusal
        lines = [b"HTTP/1.1 %d " % status]
        lines += [b"%s: %s" % header for header in answer_headers]
        lines += [b"date: " + formatdate(usegmt=True).encode("ascii"), b"", body]
        return b"\r\n".join(lines)

    def _is_usual(self, headers: dict[bytes, bytes]) -> bool:
        return b"host" in headers and len(headers) <= self._config.header_limit and _UNUSUAL.isdisjoint(headers)


def _headers(lines: bytes) -> dict[bytes, bytes] | None:
    """By their names in lower case; None where one comes twice."""
    headers: dict[bytes, bytes] = {}
    for line in lines.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        name = name.lower()
        if name in headers:
            return None
        headers[name] = value.strip(b" \t")
    return headers
