"""Floors of the package: its folders from top to bottom, and the imports between its modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]

FLOORS: Final = (
    "api/python",
    "api/ray",
    "api/commands",
    "api/bench",
    "api/fleet",
    "api/http",
    "api/http/http2",
    "api/http/http3",
    "api/http/protocol",
    "api/app",
    "api/app/pages",
    "api/live",
    "api/openapi",
    "api/tracing",
    "api/batches",
    "api/bulk",
    "api/limits",
    "api/wire/dialects",
    "api/wire",
    "api",
    "api/client",
    "api/pool",
    "runtime/pipelines",
    "runtime/engine",
    "runtime/remote",
    "runtime/plugins",
    "runtime/encoding",
    "runtime/models",
    "runtime/models/devices",
    "runtime/models/towers",
    "runtime/models/heads",
    "runtime/models/checkpoint",
    "runtime/models/folders",
    "runtime/models/tokenizing",
    "runtime/models/vision",
    "runtime/models/transformer",
    "runtime/models/videos",
    "runtime/models/images",
    "runtime/models/architectures",
    "runtime/models/quantizing",
    "runtime/models/kernels",
    "runtime/models/specs",
    "runtime/admission",
    "runtime/media",
    "runtime/memory",
    "runtime/caching",
    "runtime/tasks",
    "runtime/threads",
    "runtime/workers",
    "runtime",
    "runtime/machine",
    "stages",
    "stages/scheduling",
)
"""Folders from top to bottom: a module imports from its own folder and from those below it."""

INSTALLED: Final = {
    "staged_pool": "api/python",
    "staged_pool.client": "api/client",
    "staged_pool.pool": "api/pool",
    "staged_pool.ray": "api/ray",
}
"""Packages that are not installed under the path of their folder."""


class Import(NamedTuple):
    """An import between two modules, each given by its path in the repository."""

    importer: Path
    imported: Path

    def __str__(self) -> str:
        return f"{self.importer} imports {self.imported}"


def modules() -> dict[str, Path]:
    """Return the path of each module by its installed name."""
    found: dict[str, Path] = {}
    for path in sorted(path for top in ("api", "runtime", "stages") for path in (ROOT / top).rglob("*.py")):
        place = path.relative_to(ROOT)
        name = f"staged_pool.{'.'.join(place.with_suffix('').parts)}"
        for package, folder in INSTALLED.items():
            if place.is_relative_to(folder):
                name = ".".join((package, *place.relative_to(folder).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = place
    return found


def imports(found: Mapping[str, Path]) -> Iterator[Import]:
    """Yield each import of one module by another, type-checking imports included."""
    for place in found.values():
        for node in ast.walk(ast.parse((ROOT / place).read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [
                    full if (full := f"{node.module}.{alias.name}") in found else node.module for alias in node.names
                ]
            for name in names:
                if name.partition(".")[0] == "staged_pool" and found.get(name) != place:
                    yield Import(place, found[name])


def folder(place: Path) -> str:
    """Return the folder of a module as `FLOORS` spells it."""
    return place.parent.as_posix()
