"""Work of worker processes, and the answers to their jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from staged_pool.stages.errors import StagedPoolError


class Work(Protocol):
    """Work for the processes of one pool. It is pickled for each of them."""

    def open(self) -> Callable[[Any], Any]:
        """Load what the jobs need, in the worker process. Returns the function that does a job.

        Raises:
            Exception: Any, with a message for the operator: the pool cannot start.
        """


@dataclass(frozen=True, slots=True)
class Ready:
    """The work is open."""


@dataclass(frozen=True, slots=True)
class Done:
    """A job is done."""

    result: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The work cannot be opened, or a job has failed."""

    reason: str
    error: StagedPoolError | None = None
    """Error for the caller. None: the reason is for the log alone."""


class JobFailed(Exception):
    """A job has raised an unexpected error, which is logged."""


class WorkerDied(Exception):
    """The process of a job has ended."""
