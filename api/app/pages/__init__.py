"""Static pages for browsers, which load data from this server alone."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from staged_pool.api.asgi import Headers

HTML: Final = b"text/html; charset=utf-8"

_INLINE: Final = re.compile(rb"<(?P<tag>style|script)>(?P<text>.*?)</(?P=tag)>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Page:
    """One page. It has no data of the server, so it needs no key."""

    body: bytes
    headers: Headers


_INCLUDE: Final = re.compile(rb"<!-- include (?P<name>\S+)\.(?P<kind>css|js) -->")
_TAGS: Final = {b"css": b"style", b"js": b"script"}


def _page(name: str) -> Page:
    folder = Path(__file__).parent

    def included(found: re.Match[bytes]) -> bytes:
        part, tag = (folder / f"{found['name'].decode()}.{found['kind'].decode()}").read_bytes(), _TAGS[found["kind"]]
        return b"<%s>\n%s</%s>" % (tag, part, tag)

    body = _INCLUDE.sub(included, (folder / name).read_bytes())
    return Page(body, [(b"content-security-policy", _policy(body)), *_ALWAYS])


def _policy(body: bytes) -> bytes:
    """Return a content security policy: the page's own code, and connections to this server."""
    hashes: dict[bytes, list[bytes]] = {b"style": [], b"script": []}
    for inline in _INLINE.finditer(body):
        digest = base64.b64encode(hashlib.sha256(inline["text"]).digest())
        hashes[inline["tag"]].append(b"'sha256-%s'" % digest)
    parts = [b"default-src 'none'", b"connect-src 'self'", b"img-src data:", b"base-uri 'none'", b"form-action 'none'"]
    parts += [b"%s-src %s" % (tag, b" ".join(found)) for tag, found in hashes.items()]
    return b"; ".join([*parts, b"frame-ancestors 'none'"])


_ALWAYS: Final[Headers] = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]

PAGES: Final = {"/": _page("live.html"), "/docs": _page("docs.html")}
