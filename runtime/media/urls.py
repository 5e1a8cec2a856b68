"""Strict parser of image URLs, which rejects ambiguous ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast
from urllib.parse import quote, unquote_to_bytes, urlsplit

from staged_pool.runtime.network_addresses import literal
from staged_pool.stages.errors import InvalidInput, UrlNotAllowed

MAX_URL_CHARACTERS: Final = 2**13

URL_PARAM: Final = "image_url"
"""Name of the field of a URL in errors."""

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_UNFIT: Final = re.compile(r"[\x00-\x20\x7f\\]")
"""Ambiguous characters. Some parsers drop spaces and control characters, and treat a backslash as a slash."""
_HOST: Final = re.compile(r"(?:([A-Za-z0-9._-]{1,253})|\[([0-9A-Fa-f:.]{2,45})\])(?::(\d{1,5}))?")
_KEPT: Final = "!#$%&'()*+,/:;=?@[]~"
"""Characters that stay unchanged in a path or query. Others are percent-encoded as UTF-8 (RFC 3987, 3.1)."""

Scheme: TypeAlias = Literal["http", "https"]
_PORTS: Final = {"http": 80, "https": 443}
_FREE_PORTS: Final = 1024
"""Lowest allowed port beside 80 and 443. Lower ports belong to well-known services (RFC 6335, 6)."""


@dataclass(frozen=True, slots=True)
class WebUrl:
    """A URL of the web, split into its parts."""

    scheme: Scheme
    host: str
    """Name or address in lower case. An IPv6 address has no brackets."""
    port: int
    target: str
    """Path and query."""

    @property
    def authority(self) -> str:
        """Host and port in the form of the `Host` header (RFC 9112, 3.2)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class FileUrl:
    """A file of this machine."""

    path: str
    """Absolute path."""


def read_url(url: str) -> WebUrl | FileUrl:
    """Parse a URL.

    Raises:
        UrlNotAllowed: The scheme is not http, https or file, or the URL has a part that is not allowed.
        InvalidInput: The URL is malformed.
    """
    if len(url) > MAX_URL_CHARACTERS:
        raise _malformed(f"is longer than {MAX_URL_CHARACTERS} characters")
    scheme = _SCHEME.match(url)
    if scheme is None or scheme[1].lower() not in ("http", "https", "file"):
        raise url_not_allowed("is not one of http, https or file")
    if _UNFIT.search(url):
        raise _malformed("has a space, a control character or a backslash; write it as % and two hexadecimal digits")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _malformed("has no valid host") from None
    if parts.scheme == "file":
        return _file(parts.netloc, parts.path)
    if "@" in parts.netloc:
        raise url_not_allowed("has a user name or a password, which are not allowed")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    host, port = _host(parts.netloc)
    kind = cast(Scheme, parts.scheme)
    return WebUrl(kind, host, port or _PORTS[kind], quote(target, safe=_KEPT, errors="replace"))


def _host(authority: str) -> tuple[str, int | None]:
    found = _HOST.fullmatch(authority)
    if found is None or (found[2] and literal(found[2]) is None):
        raise _malformed("has no valid host; write names in ASCII, others in their xn-- form")
    port = int(found[3]) if found[3] else None
    if port is not None and not 1 <= port <= 65_535:
        raise _malformed("has a port that is not between 1 and 65535")
    if port is not None and port < _FREE_PORTS and port not in _PORTS.values():
        raise url_not_allowed(
            f"has a port that is kept for another service: below {_FREE_PORTS}, only 80 and 443 are allowed"
        )
    return (found[1] or found[2]).lower(), port


def _file(host: str, path: str) -> FileUrl:
    if host.lower() not in ("", "localhost"):
        raise url_not_allowed("names a file of another machine")
    plain = unquote_to_bytes(path)
    try:
        decoded = plain.decode()
    except UnicodeDecodeError:
        raise _malformed("has a path that is not UTF-8") from None
    if not decoded.startswith("/") or "\0" in decoded:
        raise _malformed("has no absolute path, as in file:///images/cat.png")
    return FileUrl(decoded)


def url_not_allowed(why: str) -> UrlNotAllowed:
    """Return the error for a URL that is not allowed. The message has no URL, which may hold a secret."""
    return UrlNotAllowed(_about(why), param=URL_PARAM)


def _malformed(why: str) -> InvalidInput:
    return InvalidInput(_about(why), param=URL_PARAM)


def _about(why: str) -> str:
    return f"The URL of the image {why}."
