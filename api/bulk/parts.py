"""Parts of a job that can be replaced: the lines, their reader, the work and the writer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from staged_pool.api.bulk.journal import State


class Line(Protocol):
    """One line of the input."""

    @property
    def number(self) -> int:
        """Place in the input, from 0."""
        ...

    @property
    def size(self) -> int:
        """Approximate bytes in memory."""
        ...


class Answer(Protocol):
    """Answer to one line."""

    @property
    def number(self) -> int:
        """Number of the line."""
        ...

    @property
    def failed(self) -> bool:
        """True if the line has failed."""
        ...

    def pieces(self) -> Sequence[bytes]:
        """Return the answer as a line of JSON, without its newline, in pieces. Runs in a thread."""
        ...

    def give_back(self) -> None:
        """Release the memory of the answer, which is written or dropped. Runs on the event loop."""
        ...


L = TypeVar("L", bound=Line)
L_co = TypeVar("L_co", bound=Line, covariant=True)
L_contra = TypeVar("L_contra", bound=Line, contravariant=True)
A = TypeVar("A", bound=Answer)
A_co = TypeVar("A_co", bound=Answer, covariant=True)
A_contra = TypeVar("A_contra", bound=Answer, contravariant=True)


class Reader(Protocol[L_co]):
    """Reads the input in one pass. Its methods run in threads, one at a time."""

    @property
    def read_share(self) -> float:
        """Part of the input that is read, from 0 to 1."""
        ...

    def read(self) -> Sequence[L_co]:
        """Return the next lines, in order; none at the end of the input."""
        ...


class Work(Protocol[L_contra, A_co]):
    """Answers lines."""

    async def do(self, lines: Sequence[L_contra], /) -> Sequence[A_co]:
        """Answer some lines, each of them once, in any order. The failure of a line is an answer.

        The job gives each answer back once it is written. If this raises, nothing is held.

        Overload is waited for. An error that is raised ends the job, which can be resumed.
        """
        ...


class Writer(Protocol[A_contra]):
    """Writes answers to parts of the output. Its methods run in threads, one at a time."""

    def write(self, answers: Sequence[A_contra]) -> None:
        """Write some answers, in any order."""
        ...

    def sync(self) -> State:
        """Sync all that is written to the disk. Returns the state to which a later writer can go back."""
        ...

    def complete(self, lines: int) -> None:
        """Write what belongs at the end of the output, and sync it.

        Args:
            lines: The number after that of the last line in the output.
        """
        ...

    def publish(self) -> None:
        """Give the files of the output their names. Called again after an end of the process, it does the rest."""
        ...

    def close(self) -> None:
        """Close all files."""
        ...
