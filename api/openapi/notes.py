"""Docstrings of the fields of a class, which Python does not keep at run time."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise


@cache
def field_notes(cls: type) -> Mapping[str, str]:
    """Return the docstrings of a class and its bases by field, each in one line.

    Empty if there is no source. It reads source files, so do not call it on the event loop.
    """
    notes: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("staged_pool."):
            notes |= _own_notes(base)
    return notes


def _own_notes(cls: type) -> dict[str, str]:
    try:
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, SyntaxError):
        return {}
    if not isinstance(definition, ast.ClassDef):
        return {}
    notes: dict[str, str] = {}
    for statement, after in pairwise(definition.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            notes[statement.target.id] = " ".join(after.value.value.split())
    return notes
