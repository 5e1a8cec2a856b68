"""The places where the product enters code of users: each of them is inside the boundary."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import staged_pool

ROOT: Final = Path(next(iter(staged_pool.__path__)))

BOUNDARIES: Final = {
    "api/app/app.py:_answer": "handlers, with their parsers in Rust",
    "api/app/plugin_routes.py:Forwarding.__call__": "the application of a plugin",
    "api/fleet/duties.py:go_on": "a duty of a process, whose end is a fault",
    "api/fleet/duties.py:obey": "orders of the supervisor",
    "api/tracing/exporting.py:PlainExporter._sent": "the exporter of spans",
    "pool/calls.py:Call._result": "the function of the progress",
    "pool/calls.py:_Source.next": "the iterator of the inputs",
    "pool/engine_thread.py:_Calls.run": "a function that another thread has the event loop run",
    "runtime/engine/lifecycle.py:Lifecycle._run_stages": "the stages, whose end is a fault",
    "runtime/engine/plugin_api.py:PluginApi.plugin_app": "the hook `routes`",
    "api/wire/user_values.py:write_value": "values of users, which are written as JSON",
    "runtime/memory/answers.py:AnswerMemory.bytes_of": "values of users, whose bytes are counted",
    "runtime/pipelines/failures.py:failure_of": "the text of a user's error",
    "runtime/plugins/model.py:PluginModel._row": "rows, which tell their bytes",
    "runtime/pipelines/run.py:PipelineRun._outcome": "fields of values that become the output",
    "runtime/pipelines/run.py:PipelineRun._through": "whatever a stage does: functions, iterators, fields",
    "runtime/pipelines/run.py:PipelineRun.once": "what all items of a request need, such as an iterator of labels",
    "runtime/pipelines/source.py:Source.next": "the iterator of the items",
    "runtime/pipelines/steps.py:FunctionStep._call": "a plain function and its generator, in a thread",
    "runtime/plugins/call.py:PluginCall._await": "awaited hooks",
    "runtime/plugins/call.py:PluginCall._run_in_process": "hooks in processes",
    "runtime/plugins/call.py:PluginCall.run_part": "plain hooks, and their generators",
    "runtime/plugins/find.py:_loaded": "the import of a plugin",
    "runtime/plugins/host.py:PluginHost._close": "the hook `aclose`",
    "runtime/plugins/host.py:PluginHost._release": "the hook `release`",
    "runtime/plugins/host.py:PluginHost._tell_left": "the hook `cancelled`",
    "runtime/plugins/model.py:PluginModel.forward": "the hook `forward`",
    "runtime/plugins/processes.py:HookProcesses._answer": "the pickling of values",
    "runtime/plugins/processor.py:PluginClass.__call__": "the constructor of a plugin",
    "stages/parse.py:ParseStage._decode": "decoders of small requests",
    "stages/postprocess.py:_outcome_of": "encoders of answers",
    "stages/rows.py:_give": "the caller's function that takes results",
    "stages/rows.py:_give.written": "the caller's function that writes results",
    "stages/supervise.py:Supervisor.run": "workers, with code of models",
    "stages/supervise.py:suppress_crash": "tasks that are not restarted",
    "stages/user_code.py:run_guarded": "tasks of a group whose silent end would lose work",
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
    for path in sorted(ROOT.rglob("*.py")):
        yield from _functions(ast.parse(path.read_text()), str(path.relative_to(ROOT)))


def _is_boundary(node: ast.AST) -> bool:
    return isinstance(node, ast.With | ast.AsyncWith) and any(
        ast.unparse(item.context_expr).startswith("user_code(") for item in node.items
    )


def test_the_boundaries_are_those_that_are_listed() -> None:
    found = {name for name, function in _all_functions() if any(map(_is_boundary, _own(function)))}
    assert found == set(BOUNDARIES), "list the code of users behind a new one here, and test whatever it may let out"
