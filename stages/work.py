"""Frozen values of the work: requests, plans and prepared inputs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from staged_pool.stages.errors import ENGINE_WORDS, Words

P_co = TypeVar("P_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A caller's request. Stages do not look into it: its `Plan` says what to do."""

    model: str | None = None
    """Served name of the model that the caller asked for. None and "": any model."""

    cache_salt: str | None = None
    """Rows and prepared images are shared with requests of an equal salt only. None is a salt, too."""

    words: Words = field(default=ENGINE_WORDS, compare=False, repr=False)
    """The caller's names for the fields of the request, for errors."""


@dataclass(frozen=True, slots=True)
class Plan(Generic[P_co]):
    """The plan of a request: its inputs, and the functions that make its result from their rows."""

    inputs: Sequence[P_co]
    """At least one. Each becomes an item, or several if preprocess cuts it."""
    finish: Callable[[Sequence[object], int], object]
    """Makes the result from the rows of all inputs and the number of tokens read.

    The row of an input that was cut is a `Parts`. Runs once, in postprocess; may run in a thread.
    """
    finish_some: Callable[[Sequence[object], Sequence[int]], tuple[Sequence[int], object]] | None = None
    """Makes partial results, for callers who stream. None: the request has only a whole result.

    Takes the rows so far (None for a missing one) and the indices of new rows. Returns the indices of the results that
    these complete, and a result of these alone. No result is returned twice.
    """
    locate: Callable[[int], tuple[str, int | None]] | None = None
    """Finds an input in the request, for errors: returns its field and its index there, or None for a single input.

    None: the inputs are those of the request, in its order, under the usual name.
    """
    finish_async: Callable[[Sequence[object], int], Awaitable[object]] | None = None
    """Does the work of `finish` instead of it, for results that wait for something.

    It is awaited in a task of its own in postprocess, which is cancelled if the request is settled before.
    """


class Parts(list[object]):
    """The rows of an input that preprocess cut into several items, in order."""


@dataclass(frozen=True, slots=True)
class Prepared(Generic[P_co]):
    """The result of preprocess for one input."""

    payload: P_co
    tokens: int
    """Tokens without padding, at least 1."""
    batch_key: Hashable = None
    """Only items with equal keys may share a batch."""
    identity: bytes | None = None
    """Items of equal identity are the same work, and get equal rows. None: unknown."""

    def identity_in(self, scope: Hashable) -> Hashable:
        """Return the identity within a `Ticket.sharing_scope`; None if it is unknown."""
        return self.identity if scope is None or self.identity is None else (self.identity, scope)
