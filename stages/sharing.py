"""Items that are the same work: one of them goes to the device, and the others get its row.

The rules:

1. A flight is all items of one identity that wait for the device, or for its answer. One of them leads: it waits in the
   waiting room, and goes to the device. The others follow: they wait for its row, and cost nothing.
2. It is the item whose turn is first that leads. One that comes later and would go sooner takes the lead, so that
   nobody waits longer than it would alone.
3. Whatever happens to the leader alone (its caller leaves, its deadline passes, its worker crashes) hands the lead to
   the next by turn who still wants the row, with the turn that it would have had. (Where that is found out while a
   batch is being cut, it goes with the next one.)
4. What the device says of the input, a row or an error, is said to all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from staged_pool.stages.errors import StagedPoolError
from staged_pool.stages.forming import BatchBuilder
from staged_pool.stages.work import Batch, Item

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)
R = TypeVar("R")

StillWanted = Callable[[Item[P]], bool]


class KeptRows(Protocol[P_contra, R]):
    """Rows of before. Its methods are called on the event loop, and return at once."""

    def get(self, identity: bytes, payload: P_contra, /) -> R | None:
        """The row of an input of this identity, for an item that carries this payload; None if none is kept."""
        ...

    def keep(self, identity: bytes, row: R, /) -> None:
        """Keep a row that the device has made, unless one of the same identity is kept already."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing(Generic[P, R]):
    """What items that are the same work share."""

    freeze: Callable[[R], object]
    """Called with a row that several are to hold: nobody may write to it any more."""
    coalesce: bool = True
    """Whether those that are inside at the same time share a row."""
    kept: KeptRows[P, R] | None = None
    """Rows of those that were inside before. None: none are kept."""


class _Flight(Generic[P]):
    """A leader and its followers; most have none, and one is made for each item."""

    __slots__ = ("followers", "leader", "turn")

    def __init__(self, leader: Item[P], turn: float) -> None:
        self.leader = leader
        self.turn = turn
        """Of the leader; before all others once it has been cut into a batch."""
        self.followers: list[tuple[float, Item[P]]] = []
        """Each with the turn that it would have had."""


class Flights(Generic[P]):
    """The way into the waiting room and out of it. Pure: no await, no clock, no device.

    Without items of equal identities it is the waiting room, at the cost of a look into a dictionary.

    Args:
        builder: The waiting room.
        coalesce: Without it, items that are the same work are worked on one by one.
    """

    def __init__(self, builder: BatchBuilder[P], *, coalesce: bool = True) -> None:
        self._builder = builder
        self._coalesce = coalesce
        self._flights: dict[Hashable, _Flight[P]] = {}
        self._bereft: list[_Flight[P]] = []
        """Those whose leader the waiting room has just let go of."""

    @property
    def following(self) -> int:
        """Items that wait for the row of another."""
        return sum(len(flight.followers) for flight in self._flights.values())

    def add(self, item: Item[P]) -> None:
        """Have an item wait for the device, or for the row of another."""
        if item.identity is None or not self._coalesce:
            self._enter(item)
            return
        turn = self._builder.turn(item.ticket)
        flight = self._flights.get(item.identity)
        if flight is None:
            self._flights[item.identity] = _Flight(item, turn)
        elif flight.turn <= turn:
            self._follow(flight, item, turn)
            return
        else:
            was, flight.leader = flight.leader, item
            self._builder.withdraw(was)
            was.ticket.waits(self._builder.lane, -was.cost)
            self._follow(flight, was, flight.turn)
            flight.turn = turn
        self._enter(item, turn)

    def take(self, still_wanted: StillWanted[P], *, among: int) -> Batch[P] | None:
        """As `BatchBuilder.take`; None only where nobody waits who wants anything."""

        def is_wanted(item: Item[P]) -> bool:
            if still_wanted(item):
                return True
            if (flight := self._led_by(item)) is not None:
                self._bereft.append(flight)
            return False

        while True:
            batch = self._builder.take(is_wanted, among=among)
            bereft, self._bereft = self._bereft, []
            heirs = [self._bequeath(flight, still_wanted) for flight in bereft]
            if batch is not None or not any(heirs):
                break
        for item in batch.items if batch is not None else ():
            item.ticket.waits(self._builder.lane, -item.cost)
            if (flight := self._led_by(item)) is not None:
                flight.turn = -math.inf
        return batch

    def land(self, item: Item[P]) -> Sequence[Item[P]]:
        """The device has given what there is to be had of this item: those who wait for it, and wait no more."""
        if (flight := self._led_by(item)) is None:
            return ()
        del self._flights[item.identity]
        return [follower for _, follower in flight.followers] if flight.followers else ()

    def lose(self, items: Iterable[Item[P]], still_wanted: StillWanted[P]) -> None:
        """The device has given nothing, and not because of these items: those who follow go in their stead."""
        for item in items:
            if (flight := self._led_by(item)) is not None:
                self._bequeath(flight, still_wanted)

    def _led_by(self, item: Item[P]) -> _Flight[P] | None:
        flight = self._flights.get(item.identity)
        return flight if flight is not None and flight.leader is item else None

    def _follow(self, flight: _Flight[P], item: Item[P], turn: float) -> None:
        item.ticket.load.spared(self._builder.lane, item.cost)
        # With the leader's payload, which is the same: however many follow, there is one of it.
        flight.followers.append((turn, item.carrying(flight.leader.payload, sent_at=item.sent_at)))

    def _bequeath(self, flight: _Flight[P], still_wanted: StillWanted[P]) -> bool:
        """Give the lead to the first who still wants the row. False where nobody does: the flight is over."""
        followers = sorted(flight.followers, key=lambda follower: follower[0])
        for place, (turn, item) in enumerate(followers):
            if still_wanted(item):
                flight.leader, flight.turn, flight.followers = item, turn, followers[place + 1 :]
                item.ticket.load.spared(self._builder.lane, -item.cost)
                self._enter(item, turn)
                return True
        del self._flights[flight.leader.identity]
        return False

    def _enter(self, item: Item[P], turn: float | None = None) -> None:
        item.ticket.waits(self._builder.lane, item.cost)
        self._builder.add((item,), turn)


def said_again(error: StagedPoolError) -> StagedPoolError:
    """The same error for another caller: each is raised with a traceback, and notes an index, of its own."""
    twin = type(error).__new__(type(error), *error.args)
    twin.args = error.args
    twin.__dict__.update(error.__dict__)
    return twin
