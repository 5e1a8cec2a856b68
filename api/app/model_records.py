"""Records of the models of a server: their states, and the reasons of failed loads."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import anyio

from staged_pool.api import status
from staged_pool.api.status import Problem
from staged_pool.api.wire.model_admin import in_keys
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.weight_memory import weights_bytes
from staged_pool.runtime.load_deadline import LoadTimedOut
from staged_pool.stages.errors import ConfigError, OutOfMemory
from staged_pool.stages.log import get_logger

State: TypeAlias = Literal["loading", "ready", "draining", "failed"]

log = get_logger("staged_pool.models")


@dataclass(slots=True, eq=False, kw_only=True)
class ModelRecord:
    """One model of the server: of two with one name, one is loading, draining or failed."""

    name: str
    config: EngineConfig
    pinned: bool
    """It is not unloaded when another load needs memory."""
    state: State
    since: float = field(default_factory=time.time)
    """Unix time of the begin of its state."""
    engine: Engine | None = None
    problem: Problem | None = None
    """Reason of a failed load."""
    done: anyio.Event = field(default_factory=anyio.Event)
    """Set when the operation that began last has ended. Each operation, and each waiter for it, keeps its own one."""

    def to(self, state: State) -> None:
        """Enter a state now."""
        self.state, self.since = state, time.time()

    @property
    def weights_bytes(self) -> int:
        """Bytes of its weights; 0 until they are loaded."""
        return 0 if self.engine is None else weights_bytes(self.engine.card)


def problem_of(error: Exception) -> Problem:
    """Return the reason of a failed load for operators, who may know folders."""
    if isinstance(error, OutOfMemory):
        return Problem(kind=status.NO_MEMORY, message=str(error))
    if isinstance(error, LoadTimedOut):
        return Problem(kind=status.LOAD_TIMED_OUT, message=str(in_keys(error)))
    if isinstance(error, ConfigError):
        return status.problem(in_keys(error))
    found = status.problem(error)
    if found.kind is status.UNEXPECTED:
        log.exception("model.load_crashed")
    return found
