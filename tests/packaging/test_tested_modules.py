"""Every module of the stages and of admission has a test file of its name."""

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


def test_every_module_of_the_stages_and_of_admission_has_tests_of_its_name() -> None:
    names = {
        path.stem
        for folder in ("stages", "runtime/admission")
        for path in (ROOT / folder).rglob("*.py")
        if path.stem != "__init__" and _does_something(path)
    }
    tests = [*(ROOT / "tests" / "stages").glob("test_*.py"), *(ROOT / "tests/runtime/admission").glob("test_*.py")]
    assert names - {path.stem.removeprefix("test_") for path in tests} == set()
