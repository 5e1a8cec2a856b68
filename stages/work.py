"""The values that travel: what a caller wants, how it is done, what an item carries, what a batch is. All frozen."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from staged_pool.stages.errors import ENGINE_WORDS, Words

if TYPE_CHECKING:
    from staged_pool.stages.ticket import Ticket

P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)
Q = TypeVar("Q")


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


@dataclass(frozen=True, slots=True, eq=False)
class Item(Generic[P_co]):
    """One unit of work of a request, with what it carries now. Each stage makes a new one."""

    ticket: Ticket
    index: int
    """Place of its input in the request."""
    payload: P_co
    sent_at: float
    """Time of its hand-over to the channel that it waits in, in seconds on the clock of the stages."""
    cost: int = 0
    batch_key: Hashable = None
    part: int = 0
    """Place among the pieces that preprocess cut its input into."""
    identity: Hashable = None
    """Items of equal identity share a row: see `Prepared.identity_in`. None: this one shares none."""

    def carrying(self, payload: Q, *, sent_at: float) -> Item[Q]:
        """The same unit of work with what the next stage is to work on."""
        return Item(self.ticket, self.index, payload, sent_at, self.cost, self.batch_key, self.part, self.identity)


class Priority(enum.StrEnum):
    """The urgency of a request."""

    INTERACTIVE = "interactive"
    """Somebody waits for it."""
    BULK = "bulk"
    """It may wait: it gets what interactive work leaves of the device, and an eighth of it at least."""


class BatchTrigger(enum.StrEnum):
    """The reason why a batch was cut where it was."""

    DEMAND = "demand"
    """Nothing more waited that may go with it: the same batch key and, with padding, the same priority."""
    SIZE = "size"
    """The next item would have exceeded the item limit."""
    COST = "cost"
    """The next item would have exceeded the token budget."""
    SHARE = "share"
    """The next items are left to the other slots."""


@dataclass(frozen=True, slots=True)
class Batch(Generic[P_co]):
    """Items that go through the device together."""

    items: Sequence[Item[P_co]]
    trigger: BatchTrigger
    cost: int
    """Tokens that the device works on: the items' own, and padding where the model pads."""
