"""Mutants of the modules that schedule, watch and settle: one change of the source each.

There are three kinds of changes. Order: two statements, or two arguments of one type, are swapped. Comparison: `<`
becomes `<=`, `min` becomes `max`. Constants: twice, half, nothing. A mutant replaces the code object of a function, so
all that have imported it see the change.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, TypeAlias

from tests.sim.equivalent import NO_MUTANTS
from tests.sim.running import MUTANT

MODULES: Final = ("stages.supervise", "stages.isolate")
"""Modules to mutate; a name that does not exist is an error."""

_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
_SIGNS: Final = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_EXTREMES: Final = {"min": "max", "max": "min"}

Change: TypeAlias = Callable[[ast.AST], None]
"""Function that changes a node of a copy of the tree."""


@dataclass(frozen=True, slots=True)
class Site:
    """One place where something can be changed."""

    line: int
    what: str
    path: tuple[tuple[str, int | None], ...]
    """Path from the function to the node: field names, and indexes in them."""
    change: Change


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one function, or of one constant."""

    module: str
    where: str
    """Qualified name of the function, or name of the constant."""
    what: str
    line: int
    make: Callable[[], Any]
    """The code of the changed function, or the changed constant."""


# ---- where something can be changed ----


def _sites(function: ast.AST, tree: ast.Module) -> Iterator[Site]:
    for path, node in _walk(function, ()):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Compare):
            for place, sign in enumerate(node.ops):
                if (other := _COMPARISONS.get(type(sign))) is not None:
                    what = f"{_SIGNS[type(sign)]} becomes {_SIGNS[other]}"
                    yield Site(line, what, path, functools.partial(_compare, place=place, other=other))
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in _EXTREMES:
                yield Site(line, f"{node.func.id} becomes {_EXTREMES[node.func.id]}", path, _extreme)
            if _may_swap_arguments(node, tree):
                yield Site(line, f"arguments of {ast.unparse(node.func)} swapped", path, _swap_arguments)
        for name in ("body", "orelse", "finalbody") if getattr(function, "name", "") != "__init__" else ():
            block = getattr(node, name, None)
            if isinstance(block, list):
                for place in range(len(block) - 1):
                    if _may_swap(block[place], block[place + 1]):
                        one, other_one = (ast.unparse(each).split("\n")[0][:40] for each in block[place : place + 2])
                        what = f"`{one}` after `{other_one}`"
                        change = functools.partial(_swap_statements, block=name, place=place)
                        yield Site(block[place].lineno, what, path, change)


def _walk(node: ast.AST, path: tuple[tuple[str, int | None], ...]) -> Iterator[tuple[Any, ast.AST]]:
    """Every node of a function and its path; annotations and decorators are left out."""
    yield path, node
    for name, value in ast.iter_fields(node):
        if name in ("decorator_list", "returns", "annotation", "args") and not isinstance(node, ast.Call):
            continue
        for place, each in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(each, ast.AST):
                yield from _walk(each, (*path, (name, place if isinstance(value, list) else None)))


def _compare(node: Any, *, place: int, other: type[ast.cmpop]) -> None:
    node.ops[place] = other()


def _extreme(node: Any) -> None:
    node.func.id = _EXTREMES[node.func.id]


def _swap_arguments(node: Any) -> None:
    node.args[0], node.args[1] = node.args[1], node.args[0]


def _swap_statements(node: Any, *, block: str, place: int) -> None:
    body = getattr(node, block)
    body[place], body[place + 1] = body[place + 1], body[place]


def _may_swap_arguments(call: ast.Call, tree: ast.Module) -> bool:
    """True if the first two arguments differ, and this module gives them one type."""
    if len(call.args) < 2 or any(isinstance(each, ast.Starred) for each in call.args[:2]):
        return False
    if ast.dump(call.args[0]) == ast.dump(call.args[1]):
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name == name:
            types = [each.annotation for each in function.args.args if each.annotation is not None]
            return len(types) > 1 and ast.dump(types[0]) == ast.dump(types[1])
    return False


def _may_swap(one: ast.stmt, other: ast.stmt) -> bool:
    """True if two statements can be swapped, and the swap may make a difference."""
    simple = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr
    if not isinstance(one, simple) or not isinstance(other, simple) or _is_text(one) or _is_text(other):
        return False
    if ast.dump(one) == ast.dump(other):
        return False
    if _written(one) & (_read(other) | _written(other)) or _written(other) & _read(one):
        return False  # by local names: the second could not run before the first
    if _acts(one) and _acts(other):
        return True
    fields = _fields_written(one), _fields_written(other)
    return bool(fields[0] & _fields_read(other) or fields[1] & _fields_read(one)) or bool(
        (fields[0] and _acts(other)) or (fields[1] and _acts(one))
    )


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _names(statement: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def _written(statement: ast.AST) -> set[str]:
    return _names(statement, ast.Store)


def _read(statement: ast.AST) -> set[str]:
    return _names(statement, ast.Load)


def _fields_written(statement: ast.AST) -> set[str]:
    found = (node for node in ast.walk(statement) if isinstance(node, ast.Attribute))
    return {ast.unparse(node) for node in found if isinstance(node.ctx, ast.Store)}


def _fields_read(statement: ast.AST) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(statement) if isinstance(node, ast.Attribute)}


_PURE: Final = {"len", "min", "max", "sum", "abs", "id", "map", "set", "list", "dict", "sorted", "range", "zip", "int"}


def _acts(statement: ast.AST) -> bool:
    """True if a statement calls something, or waits."""
    return any(
        isinstance(node, ast.Await)
        or (isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in _PURE))
        for node in ast.walk(statement)
    )


# ---- from sites to mutants ----


def _made() -> dict[str, Mutant]:
    made: dict[str, Mutant] = {}
    for name in MODULES:
        module = importlib.import_module(f"staged_pool.{name}")
        tree = ast.parse(inspect.getsource(module))
        for where, function in _functions(tree, ""):
            for site in _sites(function, tree):
                _add(made, Mutant(name, where, site.what, site.line, functools.partial(_code, module, where, site)))
        for constant, value in _constants(tree):
            for what, other in _others(value):
                _add(made, Mutant(name, constant, what, 0, functools.partial(_itself, other)))
    return made


def _add(made: dict[str, Mutant], mutant: Mutant) -> None:
    """Names do not change when lines move: equal changes of one function are told apart by their order."""
    name = f"{mutant.module.rpartition('.')[2]}.{mutant.where}: {mutant.what}"
    number = 2
    while (numbered := name if number == 2 else f"{name} ({number - 1})") in made:
        number += 1
    if numbered not in NO_MUTANTS:
        made[numbered] = mutant


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """Functions of a module and of its classes; those inside of functions belong to these."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", child


def _constants(tree: ast.Module) -> Iterator[tuple[str, float]]:
    targets: list[Any]
    for statement in tree.body:
        if isinstance(statement, ast.AnnAssign):
            targets, value = [statement.target], statement.value
        elif isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        else:
            continue
        arithmetic = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
        if value is None or not all(isinstance(node, arithmetic) for node in ast.walk(value)):
            continue
        number = eval(compile(ast.Expression(value), MUTANT, "eval"))  # a sum or a product of numbers
        if isinstance(targets[0], ast.Name) and isinstance(number, int | float) and not isinstance(number, bool):
            yield targets[0].id, number


def _others(value: float) -> Iterator[tuple[str, float]]:
    half = value // 2 if isinstance(value, int) else value / 2
    seen = {value}
    for what, other in (("twice", value * 2), ("half", half), ("nothing", type(value)(0))):
        if other not in seen:
            seen.add(other)
            yield what, other


def _itself(value: Any) -> Any:
    return value


def _code(module: ModuleType, where: str, site: Site) -> CodeType:
    """The code of a function with one change."""
    tree = ast.parse(inspect.getsource(module))
    function = dict(_functions(tree, ""))[where]
    node: Any = function
    for name, place in site.path:
        node = getattr(node, name) if place is None else getattr(node, name)[place]
    site.change(node)
    whole = compile(ast.fix_missing_locations(copy.deepcopy(tree)), MUTANT, "exec", dont_inherit=True)
    code = whole
    for part in where.split("."):
        code = _last([each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == part], where)
    return code


def _last(codes: Sequence[CodeType], where: str) -> CodeType:
    if len(codes) != 1:
        raise LookupError(f"{len(codes)} functions are called {where}")
    return codes[0]


@functools.cache
def _all() -> dict[str, Mutant]:
    return {name: mutant for name, mutant in _made().items() if _can_be_planted(mutant)}


def _can_be_planted(mutant: Mutant) -> bool:
    return mutant.line == 0 or _function(mutant) is not None


def _function(mutant: Mutant) -> FunctionType | None:
    """The function that a mutant changes; None for one that a dataclass or a protocol replaces."""
    found: Any = sys.modules[f"staged_pool.{mutant.module}"]
    for part in mutant.where.split("."):
        found = inspect.getattr_static(found, part, None)
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    found = inspect.unwrap(found) if callable(found) else None
    return found if isinstance(found, FunctionType) else None


MUTANTS: Final[dict[str, Mutant]] = _all()


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Apply a mutant during the block."""
    mutant = MUTANTS[name]
    if mutant.line:
        function = _function(mutant)
        assert function is not None
        was = function.__code__
        function.__code__ = mutant.make()
        try:
            yield
        finally:
            function.__code__ = was
    else:
        with _constant(mutant):
            yield


@contextlib.contextmanager
def _constant(mutant: Mutant) -> Iterator[None]:
    """Replace a constant in all modules that imported it by name."""
    was = getattr(sys.modules[f"staged_pool.{mutant.module}"], mutant.where)
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("staged_pool.") and vars(module).get(mutant.where) is was
    ]
    for module in modules:
        setattr(module, mutant.where, mutant.make())
    try:
        yield
    finally:
        for module in modules:
            setattr(module, mutant.where, was)
