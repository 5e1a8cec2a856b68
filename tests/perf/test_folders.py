"""Folders of the measurements: none imports from one above it in the table of `perf/README.md`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from perf.tools.servers import ROOT


def folders_imported_by(path: Path) -> Iterator[str]:
    """Yield the folder of perf that each import of a module is from."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (parts[1] for name in names if (parts := name.split("."))[0] == "perf")


def test_a_folder_imports_from_those_below_it_alone() -> None:
    floors = re.findall(r"^\| `(\w+)/` \|", (ROOT / "perf" / "README.md").read_text(), re.MULTILINE)
    modules = {folder: [*(ROOT / "perf" / folder).rglob("*.py")] for folder in floors}
    assert modules.keys() == {path.parent.name for path in ROOT.glob("perf/*/__init__.py")}
    assert not [
        f"{module.relative_to(ROOT)} imports from {imported}"
        for floor, folder in enumerate(floors)
        for module in modules[folder]
        for imported in folders_imported_by(module)
        if imported not in floors[floor:]
    ]
