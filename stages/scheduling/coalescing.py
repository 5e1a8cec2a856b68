"""Coalescing: items of equal identity are computed once, and all get the row.

1. A group has the items of one identity, one priority and one tenant that wait for the device or its result. One of
   them, the leader, is in the queue. The others are followers, and cost nothing.
2. An item that would go before the leader leads a new group instead. So no item waits longer than it would alone.
3. If the leader is dropped, because its caller leaves or its worker crashes, the followers queue up in its place.
4. The result of the leader, a row or an error, goes to the whole group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

from staged_pool.stages.scheduling.batch_former import BatchFormer, KeepEntry
from staged_pool.stages.scheduling.entries import Batch, Claim, Entry

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)
R = TypeVar("R")


class CachedRows(Protocol[P_contra, R]):
    """Rows of earlier requests. Its methods run on the event loop, and return at once."""

    def get(self, identity: Hashable, payload: P_contra, /) -> R | None:
        """Return the cached row of an identity, for an item with this payload; None if there is none."""
        ...

    def keep(self, identity: Hashable, row: R, /) -> None:
        """Cache a row of the device, unless the identity has one already."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReuse(Generic[P, R]):
    """The reuse of a row for other items of equal identity."""

    freeze: Callable[[R], object]
    """Makes a row read-only, before several requests hold it."""
    coalesce: bool = True
    """Compute equal items that are in flight at the same time once."""
    cached: CachedRows[P, R] | None = None
    """Rows of earlier requests. None: no rows are cached."""


class CoalescingLoad(Protocol):
    """The part of a `RequestLoad` that coalescing uses."""

    def adjust_tokens(self, lane: Hashable, tokens: int, /) -> None:
        """Subtract tokens that were coalesced; a negative number adds them back."""


class CoalescingClaim(Claim, Protocol):
    """A request whose entries may be coalesced."""

    @property
    def settled(self) -> bool: ...

    @property
    def load(self) -> CoalescingLoad: ...


class CoalescingEntry(Entry, Protocol):
    """An entry that may be coalesced, such as an `Item`."""

    @property
    def ticket(self) -> CoalescingClaim: ...

    @property
    def identity(self) -> Hashable:
        """Entries of equal identity are the same work. None: the entry shares no row."""

    @property
    def payload(self) -> Any: ...

    @property
    def sent_at(self) -> float: ...

    def carrying(self, payload: Any, /, *, sent_at: float) -> Self:
        """Return the same entry with another payload."""
        ...


E = TypeVar("E", bound=CoalescingEntry)


class _Group(Generic[E]):
    """A leader and its followers. Each item in the queue has one, mostly without followers."""

    __slots__ = ("followers", "is_on_device", "key", "leader", "start_tag")

    def __init__(self, key: Hashable, leader: E, start_tag: float) -> None:
        self.key = key
        self.leader = leader
        self.start_tag = start_tag
        """Start tag of the leader in the virtual time of its tenant."""
        self.is_on_device = False
        """The leader is in a batch."""
        self.followers: list[E] = []


class Coalescer(Generic[E]):
    """Adds items to the queue of the device, and takes batches out of it.

    Args:
        former: Holds the queue.
        coalesce: False: each item is computed.
    """

    def __init__(self, former: BatchFormer[E], *, coalesce: bool = True) -> None:
        self._former = former
        self._coalesce = coalesce
        self._joined: dict[Hashable, _Group[E]] = {}
        """The group that the next item may join, by identity, priority and tenant."""
        self._groups: dict[E, _Group[E]] = {}
        """All groups by leader."""
        self.following = 0
        """Number of followers in all groups."""

    def add(self, item: E) -> None:
        """Add an item to the queue, or to the followers of a leader."""
        queue = self._former.queue
        if item.identity is None or not self._coalesce:
            queue.add(item)
            return
        key = (item.identity, item.ticket.priority, item.ticket.tenant)
        group, start_tag = self._joined.get(key), queue.start_tag(item.ticket)
        if group is not None and (group.is_on_device or group.start_tag <= start_tag):
            # Followers carry the payload of the leader, so that its memory is needed once.
            group.followers.append(item.carrying(group.leader.payload, sent_at=item.sent_at))
            self.following += 1
            item.ticket.load.adjust_tokens(self._former.lane, item.tokens)
            return
        self._joined[key] = self._groups[item] = _Group(key, item, start_tag)
        queue.add(item)

    def take(self, should_keep: KeepEntry[E], running: int = 0) -> Batch[E] | None:
        """Take the next batch; None only if nothing wanted waits. See `BatchFormer.take`."""
        while True:
            dropped: list[E] = []

            def keep_or_note(item: E) -> bool:
                if wanted := should_keep(item):
                    return wanted
                dropped.append(item)  # noqa: B023  # called within this iteration of the loop
                return False

            batch = self._former.take(keep_or_note, running)
            if batch is not None:
                for item in batch.items:
                    if (group := self._groups.get(item)) is not None:
                        group.is_on_device = True
            waiting = len(self._former.queue)
            self.requeue_followers(dropped)
            if batch is not None or len(self._former.queue) == waiting:
                return batch

    def sweep(self, should_keep: KeepEntry[E]) -> None:
        """Drop all waiting items that are not wanted any more."""
        unwanted = [item for item in self._former.queue if not should_keep(item)]
        self._former.queue.drop(unwanted)
        self.requeue_followers(unwanted)

    def end_group(self, item: E) -> Sequence[E]:
        """End the group of a leader, and return its followers."""
        if (group := self._groups.pop(item, None)) is None:
            return ()
        if self._joined.get(group.key) is group:
            del self._joined[group.key]
        self.following -= len(group.followers)
        return group.followers

    def requeue_followers(self, items: Iterable[E]) -> None:
        """Queue the followers of dropped leaders in their place."""
        for item in items:
            for follower in self.end_group(item):
                if not follower.ticket.settled:
                    follower.ticket.load.adjust_tokens(self._former.lane, -follower.tokens)
                    self.add(follower)
