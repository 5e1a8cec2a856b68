"""URLs of images, read strictly: what two readers could read in two ways is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast
from urllib.parse import quote, unquote_to_bytes, urlsplit

from staged_pool.runtime.network_addresses import literal
from staged_pool.stages.errors import InvalidInput, UrlNotAllowed

MAX_CHARACTERS: Final = 2**13

PARAM: Final = "image_url"
"""What errors call the field that a URL stands in."""

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_UNFIT: Final = re.compile(r"[\x00-\x20\x7f\\]")
"""Spaces and control characters, which some readers drop, and what some of them take for a slash."""
_HOST: Final = re.compile(r"(?:([A-Za-z0-9._-]{1,253})|\[([0-9A-Fa-f:.]{2,45})\])(?::(\d{1,5}))?")
_KEPT: Final = "!#$%&'()*+,/:;=?@[]~"
"""Stays as it is in a path or a query; what is not ASCII is written as UTF-8 in percent signs (RFC 3987, 3.1)."""

Scheme: TypeAlias = Literal["http", "https"]
_PORTS: Final = {"http": 80, "https": 443}
_FREE_PORTS: Final = 1024
"""From here on: those below are of well-known services (RFC 6335, 6), which are not to be talked to by way of a URL."""


@dataclass(frozen=True, slots=True)
class WebUrl:
    """Where a host is asked for something."""

    scheme: Scheme
    host: str
    """In lower case; an address of IPv6 without its brackets."""
    port: int
    target: str
    """Path and query."""

    @property
    def authority(self) -> str:
        """As the `Host` header has it (RFC 9112, 3.2)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class FileUrl:
    """A file of this machine."""

    path: str
    """Absolute."""


def read_url(url: str) -> WebUrl | FileUrl:
    """Read a URL.

    Raises:
        UrlNotAllowed: It is none of http, https and file, or has what such a URL may have and is not followed.
        InvalidInput: It is not written as such a URL is.
    """
    if len(url) > MAX_CHARACTERS:
        raise _malformed(f"is longer than {MAX_CHARACTERS} characters")
    scheme = _SCHEME.match(url)
    if scheme is None or scheme[1].lower() not in ("http", "https", "file"):
        raise refused("is not one of http, https or file")
    if _UNFIT.search(url):
        raise _malformed("holds a space, a control character or a backslash; such are written as % and two digits")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _malformed("has no valid host") from None
    if parts.scheme == "file":
        return _file(parts.netloc, parts.path)
    if "@" in parts.netloc:
        raise refused("holds a user name or a password, which are not passed on")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    host, port = _host(parts.netloc)
    kind = cast(Scheme, parts.scheme)
    return WebUrl(kind, host, port or _PORTS[kind], quote(target, safe=_KEPT, errors="replace"))


def _host(authority: str) -> tuple[str, int | None]:
    found = _HOST.fullmatch(authority)
    if found is None or (found[2] and literal(found[2]) is None):
        raise _malformed("has no valid host; names are written in ASCII, others in their xn-- form")
    port = int(found[3]) if found[3] else None
    if port is not None and not 1 <= port <= 65_535:
        raise _malformed("has a port that is not between 1 and 65535")
    if port is not None and port < _FREE_PORTS and port not in _PORTS.values():
        raise refused(f"has a port that is kept for another service: below {_FREE_PORTS}, only 80 and 443 are asked")
    return (found[1] or found[2]).lower(), port


def _file(host: str, path: str) -> FileUrl:
    if host.lower() not in ("", "localhost"):
        raise refused("names a file of another machine")
    plain = unquote_to_bytes(path)
    try:
        decoded = plain.decode()
    except UnicodeDecodeError:
        raise _malformed("has a path that is not UTF-8") from None
    if not decoded.startswith("/") or "\0" in decoded:
        raise _malformed("has no absolute path, as in file:///images/cat.png")
    return FileUrl(decoded)


def refused(why: str) -> UrlNotAllowed:
    """The rejection of a URL that could be followed. It is not repeated: it may hold a secret."""
    return UrlNotAllowed(_about(why), param=PARAM)


def _malformed(why: str) -> InvalidInput:
    return InvalidInput(_about(why), param=PARAM)


def _about(why: str) -> str:
    return f"The URL of the image {why}."
