"""Every door of an engine has an account of its answers: a new one cannot forget it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]

ASKS: Final = ("submit", "submit_data", "stream", "process")
"""Methods of engines and pipelines that give an answer."""

DOORS: Final[Mapping[str, str]] = {
    "api/app/batch_work.py: engine.submit": "a line of a batch, until it is on the disk",
    "api/app/pipeline_routes.py: pipeline.stream": "an outcome, until it is read",
    "api/app/pipeline_routes.py: pipeline.submit": "all outcomes, until the answer is sent",
    "api/app/plugin_routes.py: engine.submit_data": "the answer of /pooling, and of a plugin's route, until it is sent",
    "api/app/task_routes.py: engine.stream": "lines of an answer, until the last one is sent",
    "api/app/task_routes.py: engine.submit": "an answer, until it is sent",
    "runtime/engine/engine.py: self.submit": "of its caller, or its own until all results are given",
    "runtime/engine/plugin_api.py: self.submit": "of its caller",
    "runtime/engine/spread_engine.py: Engine.submit": "of its caller, for each engine that is tried",
    "runtime/engine/waiting_engine.py: self._engine.submit": "of its caller",
    "runtime/engine/engine.py: self._requests.submit": "of its caller, or its own until it returns",
}
"""Calls with an account, and for how long it counts."""

OF_CALLERS: Final[Mapping[str, str]] = {
    "api/app/plugin_routes.py: engine.process": "a task that a plugin has begun for no request keeps the value",
    "runtime/engine/engine_api.py: self.submit": "methods of Python: the caller has the arrays once they return",
    "runtime/engine/plugin_api.py: self.engine_of(plugin).submit_data": "the same",
    "runtime/workers/pool.py: self._machine.process": "no engine: it starts a process",
    "runtime/pipelines/steps.py: self.engine.submit_data": "a value between two stages; a window bounds their number",
}
"""Calls without one: the engine counts until they return, and the value is the caller's."""

OTHERS: Final = ("api/client/", "api/pool/", "api/bench/", "api/commands/")
"""Floors without an engine: calls of the same names are of HTTP clients, threads and processes."""


def calls(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield each call that asks an engine; True if it gives an account."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASKS:
            gives = any(keyword.arg == "answer" for keyword in node.keywords)
            gives = gives or any(isinstance(given, ast.Name) and given.id == "held" for given in node.args)
            yield ast.unparse(node.func), gives


def test_each_door_has_an_account() -> None:
    with_account, without = set[str](), set[str]()
    for floor in ("api", "runtime"):
        for path in sorted((ROOT / floor).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(OTHERS) or "models" in path.parts:
                continue
            for call, gives in calls(path):
                (with_account if gives else without).add(f"{name}: {call}")
    assert without == OF_CALLERS.keys()
    assert with_account == DOORS.keys()


def test_a_door_that_forgets_it_is_noticed(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("engine.submit(a, b)\nengine.submit(a, b, answer=c)\nengine.stream(a)\nother(a)\n")
    assert list(calls(module)) == [("engine.submit", False), ("engine.submit", True), ("engine.stream", False)]
