"""Deadlines that pass when a test says so, however busy the machine is."""

from __future__ import annotations

import anyio

from staged_pool.runtime.engine.engine import Engine

LATER_S = 600.0
"""A timeout in seconds that does not pass by itself."""


def let_deadlines_pass(engine: Engine) -> None:
    """Let the deadlines of all requests pass that wait in an engine."""
    for scope in engine._requests._scopes.values():
        scope.deadline = anyio.current_time()
