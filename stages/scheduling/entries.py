"""The scheduler's view of work: entries of requests that wait, and the batches that are made of them."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Priority(enum.StrEnum):
    """The urgency of a request."""

    INTERACTIVE = "interactive"
    """Somebody waits for it."""
    BULK = "bulk"
    """It may wait: it gets what interactive work leaves of the device, and an eighth of it at least."""


class Claim(Protocol):
    """A request that has entries in queues, such as a `Ticket`."""

    def __hash__(self) -> int: ...

    @property
    def priority(self) -> Priority: ...

    @property
    def tenant(self) -> Hashable:
        """Owner of the request: tenants share the device fairly. None is a tenant, too."""

    @property
    def start_tags(self) -> dict[Hashable, float]:
        """Start tag of its next entry by queue name. Queues read and write it."""
        ...


class Entry(Protocol):
    """An entry of a request that waits, such as an `Item`."""

    @property
    def ticket(self) -> Claim: ...

    @property
    def cost(self) -> int:
        """Tokens, at least 1."""
        ...

    @property
    def batch_key(self) -> Hashable:
        """Only entries with equal keys go in one round."""


E_co = TypeVar("E_co", bound=Entry, covariant=True)


class BatchTrigger(enum.StrEnum):
    """The reason why a batch was cut where it was."""

    DEMAND = "demand"
    """Nothing more waited that may go with it: the same batch key and, with padding, the same priority."""
    SIZE = "size"
    """The next entry would have exceeded the item limit."""
    COST = "cost"
    """The next entry would have exceeded the token budget."""
    SHARE = "share"
    """The next entries are left to the other slots."""


@dataclass(frozen=True, slots=True)
class Batch(Generic[E_co]):
    """Entries that go through the device together."""

    items: Sequence[E_co]
    trigger: BatchTrigger
    cost: int
    """Tokens that the device works on: the entries' own, and padding where the model pads."""
