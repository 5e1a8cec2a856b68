"""The values of a request: the request itself, its plan, and what preprocess makes of each input. All frozen."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from staged_pool.stages.errors import ENGINE_WORDS, Words

P_co = TypeVar("P_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A caller's request. The stages do not look into it: the `Plan` that is made of it says what to do."""

    model: str | None = None
    """The served name that the caller asked for; None and "" mean whichever is served."""

    cache_salt: str | None = None
    """Rows and prepared images are shared with requests of the same salt only. None: with those of none."""

    words: Words = field(default=ENGINE_WORDS, compare=False, repr=False)
    """The caller's names for the fields of the request; whoever made it tells its errors in them."""


@dataclass(frozen=True, slots=True)
class Plan(Generic[P_co]):
    """The plan of a request: its parts for the device, and how their rows become its result."""

    inputs: Sequence[P_co]
    """At least one; each becomes an item."""
    finish: Callable[[Sequence[object], int], object]
    """Makes the result of one row for each input (`Parts` for one that was cut) and of the tokens read. Runs once, in
    postprocess; may run in a thread."""
    finish_some: Callable[[Sequence[object], Sequence[int]], tuple[Sequence[int], object]] | None = None
    """For a caller who wants results as they come. Of the rows that are there so far (None: not yet) and the inputs
    whose rows are new: the places of the results that are complete by them, and a result of these alone. Each result
    is complete once. None: there is only the whole."""
    locate: Callable[[int], tuple[str, int]] | None = None
    """Which field of the request an input was made of, and where in it it stands; for errors. None: the inputs are
    those of the request, in its order, and it calls them as everybody does."""


class Parts(list[object]):
    """The rows of an input that preprocess cut into several items, in order."""


@dataclass(frozen=True, slots=True)
class Prepared(Generic[P_co]):
    """The result of preprocess for one input."""

    payload: P_co
    cost: int
    """Tokens, at least 1."""
    batch_key: Hashable = None
    """Only items with equal keys may share a batch."""
    identity: bytes | None = None
    """Items of equal identity are the same work, and get equal rows. None: not known."""

    def identity_in(self, scope: Hashable) -> Hashable:
        """The identity among items of one `Ticket.sharing_scope`; None where it is not known."""
        return self.identity if scope is None or self.identity is None else (self.identity, scope)
