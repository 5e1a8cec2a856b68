"""The fair queue: whose entry goes next, among priorities, tenants and requests.

Hierarchical weighted fair queueing (Demers, Keshav and Shenker, 1989; Bennett and Zhang, 1996): each node of the tree
root - priority - tenant - request shares what it gets among its children, by tokens and by weight. The rules:

1. Each child has a start tag, in the virtual time of its parent: when it came, moved on by the tokens that it has had,
   divided by its weight. Its finish tag is what the start tag will be when its next entry has gone. The least finish
   tag goes first, so of two that wait neither is ever ahead by more than an entry of each, and a small entry does not
   wait for the large ones of others.
2. Virtual time passes by the tokens of a round, divided by the weights that waited. Where all that still wait are ahead
   of it then, it catches up with the least of them, as in WF2Q+ (Bennett and Zhang, 1997). So nobody starves behind
   newcomers, and nobody owes what others have left unused.
3. A priority or a tenant of which nothing waits is forgotten, and comes back as a new one. Nobody gains by that:
   whoever waits keeps up with virtual time. A request keeps its tag, for its entries come piece by piece.

A round is a batch, or a single entry: `first` and `take` for each of its entries, then `end_round`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heappop, heappush, heapreplace
from itertools import count
from math import inf
from typing import Final, Generic, NamedTuple, TypeVar

from staged_pool.stages.scheduling.entries import Claim, Entry, Priority
from staged_pool.stages.scheduling.tuning import INTERACTIVE_WEIGHT

WEIGHTS: Final = {Priority.INTERACTIVE: INTERACTIVE_WEIGHT, Priority.BULK: 1}
"""Weights of the priorities; all tenants, and all requests, weigh the same."""


E = TypeVar("E", bound=Entry)


class Waiting(NamedTuple):
    """Amounts that wait, in all or of one priority."""

    items: int
    requests: int
    cost: int


class _Node(Generic[E]):
    """A node of the tree; one of a request holds entries, any other has children."""

    __slots__ = (
        "backlog", "children", "cost", "entries", "heads", "heaps", "items", "name", "now", "parent", "queued",
        "requests", "served", "start", "weight", "weights", "weights_before",
    )  # fmt: skip

    def __init__(self, name: Hashable, parent: _Node[E] | None, *, start: float, now: float, weight: int) -> None:
        self.name = name
        self.parent = parent
        self.weight = weight
        self.start = start
        """Its start tag, in the virtual time of its parent."""
        self.now = now
        """Virtual time of its children."""
        self.items = self.cost = self.requests = 0
        """Entries, tokens and requests that wait below it."""
        self.children: dict[Hashable, _Node[E]] = {}
        self.weights = 0
        """Sum of the weights of its children."""
        self.weights_before = 0
        """The same, before the round; 0 where the round has had nothing of it yet."""
        self.served = 0
        """Tokens that the round has had of it."""
        self.backlog: dict[Hashable, int] = {}
        """Entries below it, by key."""
        self.heads: dict[Hashable, int] = {}
        """Tokens of the entry below it that goes next, by key."""
        self.heaps: dict[Hashable, list[tuple[float, int, _Node[E]]]] = {}
        """Children by key, by finish tags; some are out of date, see `_least`."""
        self.queued: dict[Hashable, float] = {}
        """The finish tag by which it is in a heap of its parent, by key; any other there is a leftover."""
        self.entries: dict[Hashable, deque[tuple[int, E]]] = {}
        """Entries of a request by key, each with the number of its arrival."""

    def finish(self, key: Hashable) -> float:
        """The finish tag that it has by its next entry of a key."""
        return self.start + self.heads[key] / self.weight


class FairQueue(Generic[E]):
    """Entries that wait for one place, such as a device.

    Args:
        name: Of the place: a request has a start tag in each.
    """

    def __init__(self, name: Hashable = None) -> None:
        self._name = name
        self._root = _Node[E](None, None, start=0.0, now=0.0, weight=1)
        self._served = 0.0
        """Tokens of all rounds: no virtual time is later."""
        self._touched: list[_Node[E]] = []
        """Nodes of which the round has had something, children before parents."""
        self._pushes = count()

    def __len__(self) -> int:
        """Entries that wait."""
        return self._root.items

    @property
    def waiting(self) -> Waiting:
        """All that waits."""
        return Waiting(self._root.items, self._root.requests, self._root.cost)

    def waiting_of(self, priority: Priority) -> Waiting:
        """Amounts that wait of one priority."""
        node = self._root.children.get(priority)
        return Waiting(0, 0, 0) if node is None else Waiting(node.items, node.requests, node.cost)

    @property
    def tenants(self) -> int:
        """Tenants of which something waits; one with work of both priorities counts twice."""
        return sum(len(priority.children) for priority in self._root.children.values())

    def add(self, entry: E) -> None:
        """Have an entry wait, behind those of its request."""
        key, cost = entry.batch_key, entry.cost
        node = self._request(entry)
        node.entries.setdefault(key, deque()).append((next(self._pushes), entry))
        if not node.items:
            above = node.parent
            while above is not None:
                above.requests += 1
                above = above.parent
        at: _Node[E] | None = node
        while at is not None:
            at.backlog[key] = at.backlog.get(key, 0) + 1
            at.items += 1
            at.cost += cost
            self._rank(at, key)
            at = at.parent

    def start_tag(self, ticket: Claim) -> float:
        """Start tag of the next entry of a request that comes now, in the virtual time of its tenant."""
        at = self._root
        for name in (ticket.priority, ticket.tenant):
            if (child := at.children.get(name)) is None:
                return max(self._served, ticket.start_tags.get(self._name, 0.0))
            at = child
        node = at.children.get(ticket)
        return max(at.now, ticket.start_tags.get(self._name, 0.0)) if node is None else node.start + node.cost

    def first(self, is_wanted: Callable[[E], bool], like: E | None = None) -> E | None:
        """The entry whose turn it is; None if nothing is left.

        Args:
            is_wanted: Asked of each entry that is looked at; one that is not wanted is let go of.
            like: Only entries with the batch key of this one count. None: all do.
        """
        while self._root.items:
            at = self._root
            if like is not None and like.batch_key not in at.backlog:
                return None
            while not at.entries:
                at = self._least(at, at.backlog if like is None else (like.batch_key,))
            if like is None:
                _, entry = min([entries[0] for entries in at.entries.values()])
            else:
                _, entry = at.entries[like.batch_key][0]
            if is_wanted(entry):
                return entry
            self._remove(at, entry)
        return None

    def take(self, entry: E) -> None:
        """Take an entry that waits for this round."""
        self._remove(self._request(entry), entry, taken=True)

    def all_of(self, key: Hashable, priority: Priority) -> Iterator[E]:
        """The entries of a key and a priority that wait, in no order."""
        for tenant in self._root.children[priority].children.values():
            for request in tenant.children.values():
                yield from [entry for _, entry in request.entries.get(key, ())]

    def __iter__(self) -> Iterator[E]:
        """The entries that wait, in no order."""
        for priority in self._root.children.values():
            for tenant in priority.children.values():
                for request in tenant.children.values():
                    for entries in request.entries.values():
                        yield from [entry for _, entry in entries]

    def drop(self, entries: Iterable[E]) -> None:
        """Let go of entries that wait; between rounds."""
        for entry in entries:
            self._remove(self._request(entry), entry)
        self.end_round()

    def end_round(self) -> None:
        """Let virtual time pass by what was taken, and forget those of which nothing waits any more."""
        self._served += self._root.served
        for node in self._touched:
            if node.children:
                tags = [self._least(node, (key,)).start for key in node.backlog]
                node.now = max(
                    node.now + node.served / node.weights_before, min(node.now + node.served, min(tags, default=0.0))
                )
            node.served = node.weights_before = 0
            parent = node.parent
            if not node.items and parent is not None:
                del parent.children[node.name]
                parent.weights -= node.weight
        self._touched.clear()

    def ahead(self, ticket: Claim) -> float:
        """Tokens that go before the next entry of a request.

        At each level the others count for no more than they get until its start tag, and for no more than they have.
        """
        path = [self._root]
        for name in (ticket.priority, ticket.tenant, ticket):
            if (child := path[-1].children.get(name)) is None:
                break
            path.append(child)
        tokens = 0.0
        if len(path) <= 3:
            if len(path) == 3:  # its tenant waits, but nothing of it
                lead = max(0.0, ticket.start_tags.get(self._name, 0.0) - path[-1].now)
                tokens = min(path[-1].cost, lead * path[-1].weights)
        else:
            request = path.pop()
            lead = max(0.0, request.start + request.cost - path[-1].now)
            others = path[-1].weights - request.weight
            tokens = request.cost + min(path[-1].cost - request.cost, lead * others)
        while len(path) > 1:
            node = path.pop()
            parent = path[-1]
            lead = max(0.0, node.start - parent.now) + tokens / node.weight
            tokens += min(parent.cost - node.cost, lead * (parent.weights - node.weight))
        return tokens

    def _request(self, entry: E) -> _Node[E]:
        """The node of an entry's request, made where there is none."""
        at, ticket = self._root, entry.ticket
        for name in (ticket.priority, ticket.tenant, ticket):
            child = at.children.get(name)
            if child is None:
                start, weight = at.now, WEIGHTS[ticket.priority] if at is self._root else 1
                if name is ticket:
                    start = max(start, ticket.start_tags.get(self._name, 0.0))
                child = at.children[name] = _Node[E](name, at, start=start, now=self._served, weight=weight)
                at.weights += weight
            at = child
        return at

    def _least(self, node: _Node[E], keys: Iterable[Hashable]) -> _Node[E]:
        """The child that has an entry of one of these keys, and of those the least finish tag."""
        best: tuple[float, int, _Node[E]] | None = None
        for key in keys:
            heap = node.heaps[key]
            while True:
                first = heap[0]
                child = first[2]
                if child.queued.get(key) != first[0]:
                    heappop(heap)
                elif key not in child.backlog:
                    del child.queued[key]
                    heappop(heap)
                elif (finish := child.finish(key)) != first[0]:
                    child.queued[key] = finish
                    heapreplace(heap, (finish, next(self._pushes), child))
                else:
                    break
            if best is None or first[:2] < best[:2]:
                best = first
        assert best is not None
        return best[2]

    def _rank(self, node: _Node[E], key: Hashable) -> None:
        """Put a node where it belongs among its siblings, after a change below it."""
        if key not in node.backlog:
            node.heads.pop(key, None)
            for _, _, child in node.heaps.pop(key, ()):
                child.queued.pop(key, None)
            return
        node.heads[key] = node.entries[key][0][1].cost if node.entries else self._least(node, (key,)).heads[key]
        if node.parent is not None and (finish := node.finish(key)) < node.queued.get(key, inf):
            node.queued[key] = finish  # a later one is put right when it comes first
            heappush(node.parent.heaps.setdefault(key, []), (finish, next(self._pushes), node))

    def _remove(self, request: _Node[E], entry: E, *, taken: bool = False) -> None:
        key, cost = entry.batch_key, entry.cost
        entries = request.entries[key]
        place = next(place for place, (_, waiting) in enumerate(entries) if waiting is entry)
        del entries[place]
        if not entries:
            del request.entries[key]
        if taken:
            entry.ticket.start_tags[self._name] = request.start + cost
        at: _Node[E] | None = request
        is_last = request.items == 1
        while at is not None:
            if not at.weights_before:
                at.weights_before = max(1, at.weights)
                self._touched.append(at)
            if taken:
                at.served += cost
                at.start += cost / at.weight
            at.items -= 1
            at.cost -= cost
            if is_last and at is not request:
                at.requests -= 1
            if (left := at.backlog[key] - 1) == 0:
                del at.backlog[key]
            else:
                at.backlog[key] = left
            for each in dict.fromkeys((key, *at.backlog)):  # a child that moves on may go later by any of its keys
                self._rank(at, each)
            at = at.parent
