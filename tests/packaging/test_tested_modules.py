"""Test files of the stages and of admission: one for each module, which imports it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _does_something(path: Path) -> bool:
    """True unless a module has types alone: protocols and plain values, whose methods have no statements."""
    return any(
        not isinstance(statement, ast.Expr)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in node.body
    )


def _imported(path: Path) -> set[str]:
    """Names of the modules that a file may import: `from a import b` names both `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _module(path: Path) -> str:
    return ".".join(("staged_pool", *path.relative_to(ROOT).with_suffix("").parts))


def test_every_module_of_the_stages_and_of_admission_has_tests_of_its_name_that_import_it() -> None:
    folders = (ROOT / "tests/stages", ROOT / "tests/runtime/admission")
    tests = {
        path.stem.removeprefix("test_"): _imported(path) for folder in folders for path in folder.glob("test_*.py")
    }
    modules = [
        path
        for folder in ("stages", "runtime/admission")
        for path in (ROOT / folder).rglob("*.py")
        if path.stem != "__init__" and _does_something(path)
    ]
    assert len(modules) > 20
    assert {path.stem for path in modules} - tests.keys() == set()
    assert [_module(path) for path in modules if _module(path) not in tests[path.stem]] == []
