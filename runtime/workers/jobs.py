"""Work of worker processes, and the answers to their jobs."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol


class Work(Protocol):
    """Work for the processes of one pool. It is pickled for each of them."""

    def open(self) -> Callable[[Any], Any]:
        """Load what the jobs need, in the worker process. Returns the function that does a job.

        Raises:
            Exception: Any, with a message for the operator: the process cannot start.
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

    kind: str
    """Name of the error's class."""
    reason: str
    trace: str
    """Traceback of the error in its process, as text."""
    pickled: bytes
    """The error. Empty: it cannot be pickled."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"

    @classmethod
    def by(cls, error: BaseException) -> Failed:
        """Return the answer for an error of any class."""
        reason, pickled = "", b""
        with suppress(BaseException):  # code of users: their errors may have no text, or cannot be pickled
            reason = str(error)
            pickled = pickle.dumps(error)
        return cls(type(error).__name__, reason, "".join(traceback.format_exception(error)), pickled)

    @property
    def error(self) -> BaseException | None:
        """The error; None if it cannot be made in this process."""
        with suppress(BaseException):  # code of users: its class may be unknown here, or take other arguments
            found: BaseException = pickle.loads(self.pickled)
            return found
        return None


class JobFailed(Exception):
    """A job has raised an unexpected error, which is logged."""


class JobCancelled(Exception):
    """A call was cancelled, and its process has ended with it."""


class WorkerDied(Exception):
    """The process of a job has ended after it began the job; or no process can begin it."""


class NotBegun(Exception):
    """A process has ended before it began its job, which is for another one."""
