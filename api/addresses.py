"""Route and model of a request's target, for all common spellings of a path.

Clients join base URLs and paths in different ways: with a slash at the end or two in between, with a proxy's prefix, or
with the server's own name in front (RFC 9112, section 3.2.2). All of these mean the same route.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

from staged_pool.api.asgi import Scope

MODEL: Final = "staged_pool.model"
"""Key in a scope: the model that the path names, or None. Its presence means that `place` has been called."""

MODEL_PREFIX: Final = "/m/"
"""Prefix of a model: `/m/NAME/embed` is `/embed` of the model NAME, for clients without a field for the model."""

ONE_MODEL: Final = "/v1/models/{id}"
"""Route of `GET /v1/models/org/name`."""

OBJECT: Final = "staged_pool.object"
"""Key in a scope: the file, the batch or the operator's model that the path names; absent if it names none."""

ONE_FILE: Final = "/v1/files/{id}"
FILE_CONTENT: Final = "/v1/files/{id}/content"
ONE_BATCH: Final = "/v1/batches/{id}"
CANCEL_BATCH: Final = "/v1/batches/{id}/cancel"

ADMIN_MODELS: Final = "/admin/models"
ONE_ADMIN_MODEL: Final = "/admin/models/{name}"
"""Route of one model for operators; the name may have slashes."""

MOST_SEGMENTS: Final = 16
"""Maximum number of path segments in the name of a model."""

_ABSOLUTE: Final = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
_SLASHES: Final = re.compile(r"/{2,}")
_AZURE: Final = re.compile(r"/openai/deployments/(?P<name>[^/]+)(?P<route>/.*)")
_OBJECT: Final = re.compile(r"(?P<before>/v1/(?:files|batches)/)(?P<id>[^/]+)(?P<after>/content|/cancel|)")
"""Paths of one file or batch; their ids need no percent escapes."""

_ADMIN: Final = re.compile(rf"{ADMIN_MODELS}/(?P<name>.+)")

_ONE_MODEL: Final = re.compile(r"(?:/v1)?/models/(?P<name>.+)")


class Addresses:
    """Finds the routes and models of requests to one server.

    Args:
        routes: Paths of all routes.
        names: Returns the names of the served models; empty while they load.
        root_path: Prefix that a proxy puts before every path; may be empty.
    """

    def __init__(self, routes: Iterable[str], names: Callable[[], Collection[str]], root_path: str = "") -> None:
        self._routes = frozenset(routes)
        self._names = names
        self._root_path = root_path

    def place(self, scope: Scope) -> None:
        """Replace `path` of a scope by its route, and add its `MODEL` and its `OBJECT`.

        A path without a route stays as sent, percent escapes included: unescaped, it could bypass the rules of a proxy.
        """
        if MODEL in scope:
            return
        raw = scope.get("raw_path")
        target: str = scope["path"] if raw is None else raw.decode("latin-1")
        if not target.startswith("/") and (absolute := _ABSOLUTE.match(target)):
            target = target[absolute.end() :] or "/"
        target = below(self._root_path, target)
        route, model = (target, None) if target in self._routes else self._find(target) or (target, None)
        if route not in self._routes and (found := self._object(target)) is not None:
            route, scope[OBJECT] = found
        scope["path"], scope[MODEL] = route, model

    def _object(self, target: str) -> tuple[str, str] | None:
        """Return the route and the id of a path of one object; None if it is no such path."""
        tidy = _SLASHES.sub("/", target).rstrip("/")
        if (one := _ADMIN.fullmatch(tidy)) is not None and ONE_ADMIN_MODEL in self._routes:
            name = _unescaped(one["name"])
            return None if name is None else (ONE_ADMIN_MODEL, name)
        match = _OBJECT.fullmatch(tidy.removeprefix("/openai"))
        if match is None or (route := f"{match['before']}{{id}}{match['after']}") not in self._routes:
            return None
        return route, match["id"]

    def _find(self, target: str) -> tuple[str, str | None] | None:
        """Return the route and the model of another spelling of a route; None if there is none."""
        if (plain := self._plain(target)) is not None:
            return plain
        target = _SLASHES.sub("/", target)
        if not target.startswith(MODEL_PREFIX):
            return None
        first: tuple[str, str | None] | None = None
        served = self._names()
        for name, rest in _splits(target.removeprefix(MODEL_PREFIX)):
            if (found := self._plain(rest)) is None:
                continue
            route, inner = found
            if inner not in (None, name) and route != ONE_MODEL:
                continue  # the path has two different names
            if name in served:
                return route, name
            if route != "/" or "/" not in name:  # otherwise every path would be a name
                first = first or (route, name)
        return first

    def _plain(self, target: str) -> tuple[str, str | None] | None:
        """Return the same as `_find`, for a target without `MODEL_PREFIX`."""
        tidy = _SLASHES.sub("/", target)
        tidy = tidy.rstrip("/") or "/"
        if tidy in self._routes:
            return tidy, None
        if (azure := _AZURE.fullmatch(tidy)) and (name := _unescaped(azure["name"])) is not None:
            route = next((path for path in (f"/v1{azure['route']}", azure["route"]) if path in self._routes), None)
            return None if route is None else (route, name)
        if tidy.startswith("/openai/"):
            tidy = tidy.removeprefix("/openai")
            if tidy in self._routes and tidy.startswith(("/v1/", "/models")):
                return tidy, None
        if (one := _ONE_MODEL.fullmatch(tidy)) and (name := _unescaped(one["name"])) is not None:
            return ONE_MODEL, name
        return None


def below(root_path: str, path: str) -> str:
    """Return `path` without the prefix `root_path`, if it has it as whole segments."""
    rest = path.removeprefix(root_path)
    return rest or "/" if len(rest) < len(path) and rest[:1] in ("", "/") else path


def below_mount(scope: Scope) -> Scope:
    """Return a copy of a scope whose path and raw path have no `root_path`; the original stays its host's.

    In ASGI both are the whole path, and `root_path` is its beginning, without percent escapes. Hosts that cut the path
    themselves leave the raw path whole.
    """
    root_path: str = scope.get("root_path", "").rstrip("/")
    own = dict(scope)
    own["path"] = below(root_path, scope["path"])
    if (raw := scope.get("raw_path")) is not None:
        match = _escaped(root_path).match(raw)
        own["raw_path"] = raw if match is None else raw[match.end() :] or b"/"
    return own


@lru_cache(256)
def _escaped(root_path: str) -> re.Pattern[bytes]:
    """Return the pattern of a prefix of whole segments, with or without percent escapes."""
    each = (b"(?:%s|%%(?i:%02x))" % (re.escape(bytes([byte])), byte) for byte in root_path.encode())
    return re.compile(b"".join(each) + b"(?=/|$)")


def _splits(path: str) -> Iterator[tuple[str, str]]:
    """Yield each split of `NAME/route` into name and route, the shortest name first."""
    end = path.find("/")
    for _ in range(MOST_SEGMENTS):
        name = _unescaped(path if end < 0 else path[:end])
        if name:
            yield name, "/" if end < 0 else path[end:]
        if end < 0:
            return
        end = path.find("/", end + 1)


def _unescaped(name: str) -> str | None:
    """Return a name without percent escapes; None if they are not UTF-8."""
    try:
        return unquote(name.encode("latin-1").decode(), errors="strict")
    except UnicodeDecodeError:
        return None
