"""Heads of HTTP/2 and HTTP/3 requests: checked, and converted to ASGI scopes.

Both versions have the same rules (RFC 9113, section 8; RFC 9114, section 4). A malformed head ends its stream alone.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

from staged_pool.api.asgi import Headers, Scope

LENGTH_DIGITS: Final = 18
"""Maximum digits of a content-length; no real body is that long."""

_PSEUDO: Final = frozenset((b":method", b":scheme", b":path", b":authority"))
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
"""A token (RFC 9110, section 5.6.2) without capitals."""
_METHOD: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+").fullmatch
_VALUE: Final = re.compile(rb"(?![ \t])[^\0\r\n]*(?<![ \t])").fullmatch
_PATH: Final = re.compile(rb"/[!-~]*").fullmatch
_AUTHORITY: Final = re.compile(rb"[!-~]+").fullmatch
_NOT_IN_AUTHORITY: Final = re.compile(rb"[/?#@\\]").search
_CONNECTION_HEADERS: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)


class MalformedMessage(Exception):
    """The reason why the request of a stream is malformed (RFC 9113, section 8.1.1)."""


def scope_of(
    headers: Headers,
    *,
    ended: bool,
    version: str,
    scheme: str,
    client: tuple[str, int] | None,
    server: tuple[str, int] | None,
) -> Scope:
    """Convert the decompressed head of a request to an ASGI scope; `ended`: there is no body.

    Raises:
        MalformedMessage: The head breaks a rule.
    """
    pseudo, fields = _parted(headers)
    if missing := {b":method", b":scheme", b":path"} - set(pseudo):
        raise MalformedMessage(f"{min(missing).decode()} is missing")
    if ended and any(int(value) for name, value in fields if name == b"content-length"):
        raise MalformedMessage("it has a content-length, but no body")
    method, target = pseudo[b":method"], pseudo[b":path"]
    if not _METHOD(method) or method == b"CONNECT":
        raise MalformedMessage("the method is CONNECT, which is not supported, or not a token")
    if not _PATH(target) and (method, target) != (b"OPTIONS", b"*"):
        raise MalformedMessage("the path does not begin with /, or is not ASCII")
    path, _, query = target.partition(b"?")
    return {
        "type": "http",
        "http_version": version,
        "asgi": {"spec_version": "2.1", "version": "3.0"},
        "method": method.decode(),
        "scheme": scheme,
        "path": unquote(path.decode()),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": _with_host(pseudo.get(b":authority"), fields),
        "client": client,
        "server": server,
        "extensions": {},
    }


def check_trailers(headers: Headers) -> None:
    """Check the trailers behind a body.

    Raises:
        MalformedMessage: A trailer breaks a rule.
    """
    pseudo, _ = _parted(headers)
    if pseudo:
        raise MalformedMessage("a trailer is a pseudo-header")


def _parted(headers: Headers) -> tuple[dict[bytes, bytes], Headers]:
    """Return the pseudo-headers and the other headers, after a check of each."""
    pseudo: dict[bytes, bytes] = {}
    fields: Headers = []
    for name, value in headers:
        if not _VALUE(value):
            raise MalformedMessage("the value of a header has a NUL, CR or LF, or space around it")
        if name.startswith(b":"):
            if name not in _PSEUDO or name in pseudo or fields:
                raise MalformedMessage("a pseudo-header is unknown, repeated, or behind another header")
            pseudo[name] = value
        elif not _NAME(name):
            raise MalformedMessage("the name of a header is not a lower-case token")
        elif name in _CONNECTION_HEADERS or (name == b"te" and value.lower() != b"trailers"):
            raise MalformedMessage("a header is about the connection, which HTTP/2 and HTTP/3 do not allow")
        else:
            fields.append((bytes(name), bytes(value)))
    _check_length(fields)
    return pseudo, fields


def _check_length(fields: Headers) -> None:
    lengths = {value for name, value in fields if name == b"content-length"}
    if len(lengths) > 1 or not all(length.isdigit() and len(length) <= LENGTH_DIGITS for length in lengths):
        raise MalformedMessage("the content-length is not a number of up to 18 digits, or has two values")


def _with_host(authority: bytes | None, fields: Headers) -> Headers:
    """Check the host, and return the headers with it as the first, as in HTTP/1.1."""
    hosts = [value for name, value in fields if name == b"host"]
    if authority is None and not hosts:
        raise MalformedMessage("both :authority and host are missing")
    named = hosts[0] if authority is None else authority
    if any(host != named for host in hosts) or len(hosts) > 1:
        raise MalformedMessage("the host is not the :authority, or there are several")
    if not _AUTHORITY(named) or _NOT_IN_AUTHORITY(named):
        raise MalformedMessage("the :authority is not a host with an optional port")
    return [(b"host", named), *((name, value) for name, value in fields if name != b"host")]
