"""What the source says of the fields of a class: the docstrings below them, which Python itself does not keep."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise


@cache
def field_notes(cls: type) -> Mapping[str, str]:
    """By field, those of its bases included, each in one line. Where there is no source, there are none.

    FileReads source files: not for the event loop.
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
