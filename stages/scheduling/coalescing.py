"""Coalescing: items that are the same work go to the device once, and all get its row.

1. A group is the items of one identity, one priority and one tenant that wait for the device, or for its answer. One of
   them, the leader, waits in the queue; the rest are followers, and cost nothing.
2. An item whose turn would come sooner than the leader's does not follow it: it leads a group of its own. So nobody
   waits longer than it would alone.
3. If the leader comes to nothing (its caller leaves, its worker crashes), the followers queue up in its stead.
4. A result of the device, a row or an error, goes to all of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

from staged_pool.stages.scheduling.batch_former import BatchFormer, StillWanted
from staged_pool.stages.scheduling.entries import Batch, Claim, Entry

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)
R = TypeVar("R")


class KeptRows(Protocol[P_contra, R]):
    """Rows of earlier requests. Its methods are called on the event loop, and return at once."""

    def get(self, identity: Hashable, payload: P_contra, /) -> R | None:
        """The row of an input of this identity, for an item that carries this payload; None if none is kept."""
        ...

    def keep(self, identity: Hashable, row: R, /) -> None:
        """Keep a row that the device has made, unless one of the same identity is kept already."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing(Generic[P, R]):
    """Settings of what items that are the same work share."""

    freeze: Callable[[R], object]
    """Called with a row that several are to hold: nobody may write to it any more."""
    coalesce: bool = True
    """Items that are inside at the same time share a row."""
    kept: KeptRows[P, R] | None = None
    """Rows of earlier requests. None: none are kept."""


class SharedLoad(Protocol):
    """The account of a request's tokens that coalescing changes."""

    def adjust_tokens(self, lane: Hashable, tokens: int, /) -> None:
        """Subtract tokens that were coalesced; a negative number adds them back."""


class SharingClaim(Claim, Protocol):
    """A request whose entries may be coalesced."""

    @property
    def settled(self) -> bool: ...

    @property
    def load(self) -> SharedLoad: ...


class SharedEntry(Entry, Protocol):
    """An entry that may be coalesced, such as an `Item`."""

    @property
    def ticket(self) -> SharingClaim: ...

    @property
    def identity(self) -> Hashable:
        """Entries of equal identity are the same work. None: shares with none."""

    @property
    def payload(self) -> Any: ...

    @property
    def sent_at(self) -> float: ...

    def carrying(self, payload: Any, /, *, sent_at: float) -> Self:
        """Return the same entry with another payload."""
        ...


E = TypeVar("E", bound=SharedEntry)


class _Group(Generic[E]):
    """A leader and its followers; one is made for each item, and most have no followers."""

    __slots__ = ("followers", "is_on_device", "key", "leader", "start_tag")

    def __init__(self, key: Hashable, leader: E, start_tag: float) -> None:
        self.key = key
        self.leader = leader
        self.start_tag = start_tag
        """Start tag of the leader, in the virtual time of its tenant."""
        self.is_on_device = False
        """The leader is on the device, or on its way to it."""
        self.followers: list[E] = []


class Coalescer(Generic[E]):
    """The way into the queue in front of the device, and out of it.

    Args:
        former: Has the queue.
        coalesce: False: each item goes to the device by itself.
    """

    def __init__(self, former: BatchFormer[E], *, coalesce: bool = True) -> None:
        self._former = former
        self._coalesce = coalesce
        self._joined: dict[Hashable, _Group[E]] = {}
        """The group that the next item of a key may join."""
        self._led: dict[E, _Group[E]] = {}
        """All groups, by their leaders."""
        self.following = 0
        """Items that wait for the row of another."""

    def add(self, item: E) -> None:
        """Have an item wait for the device, or for the row of another."""
        queue = self._former.queue
        if item.identity is None or not self._coalesce:
            queue.add(item)
            return
        key = (item.identity, item.ticket.priority, item.ticket.tenant)
        group, start_tag = self._joined.get(key), queue.start_tag(item.ticket)
        if group is not None and (group.is_on_device or group.start_tag <= start_tag):
            # All carry the payload of the leader: however many they are, there is one of it.
            group.followers.append(item.carrying(group.leader.payload, sent_at=item.sent_at))
            self.following += 1
            item.ticket.load.adjust_tokens(self._former.lane, item.cost)
            return
        self._joined[key] = self._led[item] = _Group(key, item, start_tag)
        queue.add(item)

    def take(self, still_wanted: StillWanted[E], running: int = 0) -> Batch[E] | None:
        """Take the next batch, see `BatchFormer.take`; None only where nothing wanted waits."""
        while True:
            dropped: list[E] = []

            def is_wanted(item: E) -> bool:
                if wanted := still_wanted(item):
                    return wanted
                dropped.append(item)  # noqa: B023  # called within this turn of the loop
                return False

            batch = self._former.take(is_wanted, running)
            if batch is not None:
                for item in batch.items:
                    if (group := self._led.get(item)) is not None:
                        group.is_on_device = True
            waiting = len(self._former.queue)
            self.lose(dropped)
            if batch is not None or len(self._former.queue) == waiting:
                return batch

    def sweep(self, still_wanted: StillWanted[E]) -> None:
        """Let go of all items that wait, and that nobody wants any more."""
        unwanted = [item for item in self._former.queue if not still_wanted(item)]
        self._former.queue.drop(unwanted)
        self.lose(unwanted)

    def land(self, item: E) -> Sequence[E]:
        """End the group of an item that the device has answered; returns its followers."""
        if (group := self._led.pop(item, None)) is None:
            return ()
        if self._joined.get(group.key) is group:
            del self._joined[group.key]
        self.following -= len(group.followers)
        return group.followers

    def lose(self, items: Iterable[E]) -> None:
        """Have the followers of items that came to nothing queue up in their stead."""
        for item in items:
            for follower in self.land(item):
                if not follower.ticket.settled:
                    follower.ticket.load.adjust_tokens(self._former.lane, -follower.cost)
                    self.add(follower)
