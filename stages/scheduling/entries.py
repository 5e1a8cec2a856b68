"""The scheduler's view of work: entries that wait, and batches made of them."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Priority(enum.StrEnum):
    """The urgency of a request."""

    INTERACTIVE = "interactive"
    """A user waits for the answer."""
    BULK = "bulk"
    """The answer is not urgent. Bulk work gets the rest of the device, and at least an eighth of it."""


class Claim(Protocol):
    """A request with entries in queues, such as a `Ticket`."""

    def __hash__(self) -> int: ...

    @property
    def priority(self) -> Priority: ...

    @property
    def tenant(self) -> Hashable:
        """Owner of the request. Tenants share the device fairly; None is a tenant, too."""

    @property
    def start_tags(self) -> dict[Hashable, float]:
        """Start tag of the next entry, by queue name. Queues read and write it."""
        ...


class Entry(Protocol):
    """An entry of a request in a queue, such as an `Item`."""

    @property
    def ticket(self) -> Claim: ...

    @property
    def tokens(self) -> int:
        """Tokens without padding, at least 1."""
        ...

    @property
    def batch_key(self) -> Hashable:
        """Only entries with equal keys may go in one round."""


E_co = TypeVar("E_co", bound=Entry, covariant=True)


class BatchTrigger(enum.StrEnum):
    """The reason for the size of a batch."""

    DEMAND = "demand"
    """Nothing more waited that fits: of the same batch key and, with padding, the same priority."""
    SIZE = "size"
    """The next entry would have exceeded the item limit."""
    BUDGET = "cost"  # the label of the metric
    """The next entry would have exceeded the token budget."""
    SHARE = "share"
    """The next entries were left to the other slots; see rule 5 of `batch_former`."""


@dataclass(frozen=True, slots=True)
class Batch(Generic[E_co]):
    """Entries that the device computes together."""

    items: Sequence[E_co]
    trigger: BatchTrigger
    tokens: int
    """Tokens that the device computes: those of the entries, and padding if the model pads."""
