"""The places where pipelines, streams and pools enter code of users: each of them is inside the boundary."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import staged_pool

ROOT: Final = Path(next(iter(staged_pool.__path__)))

PARTS: Final = ("runtime/pipelines", "stages/rows.py", "pool")

BOUNDARIES: Final = {
    "pool/calls.py:Call._result": "the function of the progress",
    "pool/calls.py:_Source.next": "the iterator of the inputs",
    "pool/engine_thread.py:_Calls.run": "a function that another thread has the event loop run",
    "runtime/pipelines/run.py:PipelineRun._outcome": "fields of values that become the output",
    "runtime/pipelines/run.py:PipelineRun._through": "whatever a stage does: functions, iterators, fields",
    "runtime/pipelines/run.py:PipelineRun.once": "what all items of a request need, such as an iterator of labels",
    "runtime/pipelines/source.py:Source.next": "the iterator of the items",
    "runtime/pipelines/steps.py:FunctionStep._call": "a plain function and its generator, in a thread",
    "stages/rows.py:_give": "the caller's function that takes results",
    "stages/rows.py:_give.written": "the caller's function that writes results",
}
"""Each function with a boundary, and the code of users behind it."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(node: ast.AST, name: str) -> Iterator[tuple[str, Function]]:
    """Yield each function below a node, with the name of its module and its own."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | Function):
            inner = f"{name}{':' if name.endswith('.py') else '.'}{child.name}"
            if isinstance(child, Function):
                yield inner, child
            yield from _functions(child, inner)
        else:
            yield from _functions(child, name)


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, but not those of the functions in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function):
            yield child
            yield from _own(child)


def _all_functions() -> Iterator[tuple[str, Function]]:
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")) or [ROOT / part]:
            yield from _functions(ast.parse(path.read_text()), str(path.relative_to(ROOT)))


def _is_boundary(node: ast.AST) -> bool:
    return isinstance(node, ast.With | ast.AsyncWith) and any(
        ast.unparse(item.context_expr) == "user_code()" for item in node.items
    )


def test_the_boundaries_are_those_that_are_listed() -> None:
    found = {name for name, function in _all_functions() if any(map(_is_boundary, _own(function)))}
    assert found == set(BOUNDARIES), "list the code of users behind a new one here, and test whatever it may let out"
