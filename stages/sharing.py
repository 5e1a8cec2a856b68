"""Items that are the same work: one of them goes to the device, and the others get its row.

The rules:

1. A flight is all items of one identity that wait for the device, or for its answer. One goes to the device. The others
   wait for its row, and cost nothing: it is the tenant of the one that goes that pays.
2. In each priority each tenant has one item of a flight in the waiting room, that whose turn is first: it leads the
   others, which follow. One that comes later and would go sooner takes the lead. The leader that is cut into a batch
   goes for all of the flight, and the other leaders follow it. So nobody waits longer than it would alone (but for an
   item of each other request: turns are not more exact than that). Turns are compared only where they are of one
   virtual time, in which nothing that comes later changes their order.
3. Whatever happens to a leader alone (its caller leaves, its deadline passes, its worker crashes) hands the lead to the
   next by turn, of its tenant and priority, who still wants the row, with the turn that it would have had. (Where that
   is found out while a batch is being cut, it goes with the next one.) After a crash each tenant has a leader again.
4. What the device says of the input, a row or an error, is said to all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from staged_pool.stages.forming import BatchBuilder
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.work import Batch, Item, Priority

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)
R = TypeVar("R")

StillWanted = Callable[[Item[P]], bool]

_Asker: TypeAlias = tuple[Priority, Hashable]
"""A tenant, in one priority."""


class KeptRows(Protocol[P_contra, R]):
    """Rows of before. Its methods are called on the event loop, and return at once."""

    def get(self, identity: Hashable, payload: P_contra, /) -> R | None:
        """The row of an input of this identity, for an item that carries this payload; None if none is kept."""
        ...

    def keep(self, identity: Hashable, row: R, /) -> None:
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
    """Leaders and followers; most have one leader and nobody else, and one is made for each item."""

    __slots__ = ("followers", "gone", "leaders", "payload")

    def __init__(self, item: Item[P], turn: float) -> None:
        self.payload = item.payload
        """Carried by all that join it, for theirs is the same: however many these are, there is one of it."""
        self.leaders: dict[_Asker, tuple[float, Item[P]]] = {_asker(item.ticket): (turn, item)}
        """In the waiting room, each with its turn; of no meaning once one has gone."""
        self.gone: Item[P] | None = None
        """On the device, or on its way to it."""
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

    @property
    def following(self) -> int:
        """Items that wait for the row of another."""
        return sum(len(flight.followers) for flight in self._flights.values())

    def add(self, item: Item[P]) -> None:
        """Have an item wait for the device, or for the row of another."""
        if item.identity is None or not self._coalesce:
            self._enter(item)
            return
        flight = self._flights.get(item.identity)
        if flight is None:
            self._flights[item.identity] = _Flight(item, self._enter(item))
            return
        turn = self._builder.turn(item.ticket)
        asker = _asker(item.ticket)
        led = flight.leaders.get(asker)
        if flight.gone is not None or (led is not None and led[0] <= turn):
            self._follow(flight, item, turn)
            return
        item = item.carrying(flight.payload, sent_at=item.sent_at)
        flight.leaders[asker] = turn, item
        self._enter(item, turn)  # before the other one goes, or a tenant of nothing else would come as a new one
        if led is not None:
            self._builder.withdraw(led[1])
            self._step_back(flight, led[1], led[0])

    def take(self, still_wanted: StillWanted[P], *, among: int, running: int = 0) -> Batch[P] | None:
        """As `BatchBuilder.take`; None only where nobody waits who wants anything."""
        offered: dict[Hashable, Item[P]] = {}
        passed: set[Item[P]] = set()
        bereft: set[Hashable] = set()

        def is_wanted(item: Item[P]) -> bool:
            if not still_wanted(item):
                if (flight := self._led_by(item)) is not None:
                    del flight.leaders[_asker(item.ticket)]
                    bereft.add(item.identity)
                return False
            if not self._coalesce or item.identity is None or offered.setdefault(item.identity, item) is item:
                return True
            passed.add(item)  # one like it is in this batch, or may be
            return False

        while True:
            batch = self._builder.take(is_wanted, among=among, running=running)
            for item in batch.items if batch is not None else ():
                item.ticket.waits(self._builder.lane, -item.cost)
                if (flight := self._flights.get(item.identity)) is not None:
                    flight.gone = item
                    if len(flight.leaders) > 1:
                        self._take_along(flight, item, passed)
            heirs = [self._bequeath(identity, still_wanted) for identity in bereft]
            self._put_back(passed)
            if batch is not None or not any(heirs):
                return batch
            bereft.clear()

    def land(self, item: Item[P]) -> Sequence[Item[P]]:
        """The device has given what there is to be had of this item: those who wait for it, and wait no more."""
        flight = self._flights.get(item.identity)
        if flight is None or flight.gone is not item:
            return ()
        del self._flights[item.identity]
        return [follower for _, follower in flight.followers] if flight.followers else ()

    def lose(self, items: Iterable[Item[P]], still_wanted: StillWanted[P]) -> None:
        """The device has given nothing, and not because of these items: those who follow go in their stead."""
        for item in items:
            flight = self._flights.get(item.identity)
            if flight is not None and flight.gone is item:
                flight.gone = None
                flight.leaders.clear()
                self._bequeath(item.identity, still_wanted)

    def _led_by(self, item: Item[P]) -> _Flight[P] | None:
        flight = self._flights.get(item.identity)
        led = None if flight is None else flight.leaders.get(_asker(item.ticket))
        return flight if led is not None and led[1] is item else None

    def _take_along(self, flight: _Flight[P], gone: Item[P], passed: set[Item[P]]) -> None:
        """Have the other leaders follow the one that goes; those passed over have left the waiting room already."""
        for turn, item in flight.leaders.values():
            if item is not gone:
                if item not in passed:
                    self._builder.withdraw(item)
                self._step_back(flight, item, turn)
        flight.leaders.clear()

    def _put_back(self, passed: Iterable[Item[P]]) -> None:
        """Have those wait on that were passed over for one that is like them, and was then left where it is."""
        for item in passed:
            if (flight := self._led_by(item)) is not None:
                self._builder.enter(item, flight.leaders[_asker(item.ticket)][0])

    def _step_back(self, flight: _Flight[P], leader: Item[P], turn: float) -> None:
        leader.ticket.waits(self._builder.lane, -leader.cost)
        self._follow(flight, leader, turn)

    def _follow(self, flight: _Flight[P], item: Item[P], turn: float) -> None:
        item.ticket.load.spared(self._builder.lane, item.cost)
        flight.followers.append((turn, item.carrying(flight.payload, sent_at=item.sent_at)))

    def _bequeath(self, identity: Hashable, still_wanted: StillWanted[P]) -> bool:
        """Where none has gone, give a leader to those who follow and have none: the first by turn who still wants the
        row. True if there are such heirs; a flight of nobody is over."""
        flight = self._flights[identity]
        if flight.gone is not None:
            return False
        followers, flight.followers = flight.followers, []
        followers.sort(key=lambda follower: follower[0])
        has_heirs = False
        for turn, item in followers:
            asker = _asker(item.ticket)
            if asker in flight.leaders:
                flight.followers.append((turn, item))
            elif still_wanted(item):
                flight.leaders[asker] = turn, item
                item.ticket.load.spared(self._builder.lane, -item.cost)
                self._enter(item, turn)
                has_heirs = True
        if not flight.leaders:
            del self._flights[identity]
        return has_heirs

    def _enter(self, item: Item[P], turn: float | None = None) -> float:
        item.ticket.waits(self._builder.lane, item.cost)
        return self._builder.enter(item, turn)


def _asker(ticket: Ticket) -> _Asker:
    return ticket.priority, ticket.tenant
