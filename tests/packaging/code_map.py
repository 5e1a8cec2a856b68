"""The code map of the documents, made from the first sentences of module docstrings.

`python -m tests.packaging.code_map` writes docs/code-map.md and the table of folders in ARCHITECTURE.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.packaging.floors import FLOORS, ROOT, folder, modules

CODE_MAP: Final = ROOT / "docs" / "code-map.md"
ARCHITECTURE: Final = ROOT / "ARCHITECTURE.md"

BEGIN: Final = "<!-- folders: written by `python -m tests.packaging.code_map` -->\n"
END: Final = "<!-- end of folders -->\n"

_SENTENCE_END: Final = re.compile(r"(?<=[.?!])\s")

_HEAD: Final = """\
# Code map

One row for each module, from the first sentence of its docstring. `python -m tests.packaging.code_map` writes this
page. Folders are in the order of imports: a module imports only from its own folder and from those below it.
[ARCHITECTURE.md](../ARCHITECTURE.md) explains how they work together.
"""


def summary(place: Path) -> str:
    """Return the first sentence of a module's docstring, in one line."""
    text = ast.get_docstring(ast.parse((ROOT / place).read_text())) or ""
    paragraph = " ".join(text.split("\n\n", 1)[0].split())
    return _SENTENCE_END.split(paragraph)[0].replace("|", "\\|")


def rows(found: Mapping[str, Path], name: str) -> Iterator[str]:
    """Yield the table of one folder, without its `__init__` module."""
    yield "| module | |"
    yield "|---|---|"
    for place in sorted(found.values()):
        if folder(place) == name and place.name != "__init__.py":
            yield f"| [{place.name}](../{place}) | {summary(place)} |"


def code_map() -> str:
    """Return the text of docs/code-map.md."""
    found = modules()
    parts = [_HEAD]
    for name in FLOORS:
        table = list(rows(found, name))
        lines = [f"## {name}/", "", summary(Path(name) / "__init__.py")]
        parts.append("\n".join(lines + (["", *table] if len(table) > 2 else [])) + "\n")
    return "\n".join(parts)


def folders() -> str:
    """Return the table of folders in ARCHITECTURE.md."""
    links = {name: f"[{name}/](docs/code-map.md#{_anchor(name)})" for name in FLOORS}
    lines = [f"| {links[name]} | {summary(Path(name) / '__init__.py')} |" for name in FLOORS]
    return "\n".join(["| folder | |", "|---|---|", *lines]) + "\n"


def with_folders(text: str) -> str:
    """Return the text of ARCHITECTURE.md with its table of folders as it should be."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{folders()}\n{END}{rest.partition(END)[2]}"


def _anchor(name: str) -> str:
    """Return the anchor that GitHub gives the heading of a folder."""
    return name.replace("/", "")


def main() -> None:
    CODE_MAP.write_text(code_map())
    ARCHITECTURE.write_text(with_folders(ARCHITECTURE.read_text()))


if __name__ == "__main__":
    main()
