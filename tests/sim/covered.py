"""Coverage of the engine by worlds: the lines that none of them reaches."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.sim.clock import BACKENDS
from tests.sim.running import COLLECT_EVERY, collect_garbage, prepared, run_seed

WATCHED = (
    "*/stages/*",
    "*/runtime/engine/*",
    "*/runtime/admission/*",
    "*/runtime/media/image_completer.py",
    "*/runtime/caching/*",
    "*/api/http/connection*.py",
)


def never_reached(seeds: Iterable[int]) -> dict[str, tuple[int, list[int]]]:
    """Run these seeds; by file: how many lines it has, and those that were not reached.

    Raises:
        ImportError: The package `coverage` is missing.
    """
    import coverage

    counter = coverage.Coverage(data_file=None, include=WATCHED, config_file=False, messages=False)
    with prepared():
        counter.start()
        try:
            for seed in seeds:
                run_seed(seed, BACKENDS[seed // 10 % len(BACKENDS)])
                if seed % COLLECT_EVERY == 0:
                    collect_garbage()
        finally:
            counter.stop()
    found: dict[str, tuple[int, list[int]]] = {}
    for path in sorted(counter.get_data().measured_files()):
        _, lines, _, missing, _ = counter.analysis2(path)
        found[path] = len(lines), [line for line in missing if not _is_of_definitions(path, line)]
    return found


def _is_of_definitions(path: str, line: int) -> bool:
    """True if a line ran when its module was imported, before the count began."""
    return line in _definitions(path)


_KNOWN: dict[str, set[int]] = {}


def _definitions(path: str) -> set[int]:
    import ast

    if path not in _KNOWN:
        tree = ast.parse(Path(path).read_text())
        inside: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inside |= {n.lineno for statement in node.body for n in ast.walk(statement) if hasattr(n, "lineno")}
        everything = {n.lineno for n in ast.walk(tree) if hasattr(n, "lineno")}
        _KNOWN[path] = everything - inside
    return _KNOWN[path]


def shown(found: dict[str, tuple[int, list[int]]]) -> Iterable[str]:
    """A line for each file, and each stretch that was not reached with its text."""
    for path, (lines, missing) in found.items():
        yield f"{path}: {len(missing)} of {lines} lines are never reached"
        text: Any = Path(path).read_text().splitlines()
        for line in missing:
            yield f"    {line:4} {text[line - 1].rstrip()}"
