"""The route and the model that the target of a request names, however its client spells them.

Clients join base URLs and paths in their own ways: with a slash at the end or two in between, with a proxy's prefix,
with the server's own name in front (RFC 9112, section 3.2.2). All of these are the same route.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final
from urllib.parse import unquote

from staged_pool.api.asgi import Scope

MODEL: Final = "staged_pool.model"
"""Key of a scope: the model that the path names; None where it names none. A scope that has it is placed."""

PREFIX: Final = "/m/"
"""`/m/NAME/embed` is `/embed` of the model NAME: for clients that have no field for a model's name."""

ONE_MODEL: Final = "/v1/models/{id}"
"""The route of `GET /v1/models/org/name`."""

MOST_SEGMENTS: Final = 16
"""Segments of a path that may belong to the name of a model."""

_ABSOLUTE: Final = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
_SLASHES: Final = re.compile(r"/{2,}")
_AZURE: Final = re.compile(r"/openai/deployments/(?P<name>[^/]+)(?P<route>/.*)")
_ONE_MODEL: Final = re.compile(r"(?:/v1)?/models/(?P<name>.+)")


class Addresses:
    """Places requests at the routes of one server.

    Args:
        routes: Paths that are served.
        names: Gives the names of the served models; empty while they load.
        root_path: What a proxy puts before every path; empty for nothing.
    """

    def __init__(self, routes: Iterable[str], names: Callable[[], Collection[str]], root_path: str = "") -> None:
        self._routes = frozenset(routes)
        self._names = names
        self._root_path = root_path

    def place(self, scope: Scope) -> None:
        """Write the route into `path` of a scope, and the model that the path names under `MODEL`.

        The path of a request that has no route stays as it was sent, with its escapes: a proxy may have let it pass as
        another one.
        """
        if MODEL in scope:
            return
        raw = scope.get("raw_path")
        target: str = scope["path"] if raw is None else raw.decode("latin-1")
        if not target.startswith("/") and (absolute := _ABSOLUTE.match(target)):
            target = target[absolute.end() :] or "/"
        target = below(self._root_path, target)
        route, model = (target, None) if target in self._routes else self._find(target) or (target, None)
        scope["path"], scope[MODEL] = route, model

    def _find(self, target: str) -> tuple[str, str | None] | None:
        """The route and the model of a target that is no route as it is spelled; None where there is no such route."""
        if (plain := self._plain(target)) is not None:
            return plain
        target = _SLASHES.sub("/", target)
        if not target.startswith(PREFIX):
            return None
        first: tuple[str, str | None] | None = None
        served = self._names()
        for name, rest in _splits(target.removeprefix(PREFIX)):
            if (found := self._plain(rest)) is None:
                continue
            route, inner = found
            if inner not in (None, name) and route != ONE_MODEL:
                continue  # two names
            if name in served:
                return route, name
            if route != "/" or "/" not in name:  # else any path at all would be a name
                first = first or (route, name)
        return first

    def _plain(self, target: str) -> tuple[str, str | None] | None:
        """As `_find`, of a target without `PREFIX`."""
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
    """`path` without the prefix `root_path`, where it has it as whole segments."""
    rest = path.removeprefix(root_path)
    return rest or "/" if len(rest) < len(path) and rest[:1] in ("", "/") else path


def _splits(path: str) -> Iterator[tuple[str, str]]:
    """Every way to divide `NAME/route` of so many segments, the shortest name first."""
    end = path.find("/")
    for _ in range(MOST_SEGMENTS):
        name = _unescaped(path if end < 0 else path[:end])
        if name:
            yield name, "/" if end < 0 else path[end:]
        if end < 0:
            return
        end = path.find("/", end + 1)


def _unescaped(name: str) -> str | None:
    """A name without percent escapes; None where they are no UTF-8."""
    try:
        return unquote(name.encode("latin-1").decode(), errors="strict")
    except UnicodeDecodeError:
        return None
