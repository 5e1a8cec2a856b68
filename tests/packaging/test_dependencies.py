"""Imported packages have a lower bound, and a cap where they are subclassed."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

from tests.packaging.lowest import PROJECT, lowest

ROOT: Final = PROJECT.parent
NAMES: Final = {"PIL": "pillow"}
"""Package names of modules that have another name."""
OPTIONAL: Final = {"aioquic", "av", "matplotlib", "opentelemetry", "pyarrow", "pylsqpack", "ray"}


def _imported() -> set[str]:
    found: set[str] = set()
    for folder in ("api", "runtime", "stages"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"staged_pool", "__future__"}


def test_what_builds_the_package_is_among_the_lowest() -> None:
    """The setuptools that comes with Python 3.11 is older than the build needs."""
    assert "setuptools" in lowest()


def test_every_package_that_is_imported_is_declared() -> None:
    declared = {name.replace("-", "_") for name in lowest()}
    imported = {NAMES.get(name, name) for name in _imported()} - OPTIONAL
    assert imported - declared == set()


@pytest.mark.parametrize("name", ["hypercorn", "h11", "h2", "hpack", "transformers"])
def test_what_is_subclassed_is_capped(name: str) -> None:
    with Path(PROJECT).open("rb") as file:
        dependencies: list[str] = tomllib.load(file)["project"]["dependencies"]
    (declared,) = (each for each in dependencies if each.startswith(f"{name}>"))
    assert ",<" in declared
