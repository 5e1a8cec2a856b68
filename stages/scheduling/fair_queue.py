"""The fair queue: entries in a fair order of priorities, tenants and requests.

Hierarchical weighted fair queueing (Demers, Keshav and Shenker, 1989; Bennett and Zhang, 1996): each node of the tree
root - priority - tenant - request divides its share among its children, by tokens and by weight. The rules:

1. Each child has a start tag in the virtual time of its parent. It begins at the arrival, and grows by the tokens that
   the child has had, divided by its weight. The finish tag is the start tag after the next entry. The child with the
   least finish tag goes first. So two children that wait are never apart by more than an entry of each, and a small
   entry does not wait for large entries of others.
2. Virtual time grows by the tokens of a round, divided by the weights that waited. If all children that still wait are
   then ahead of it, it jumps to the least start tag, as in WF2Q+ (Bennett and Zhang, 1997). So no child starves behind
   new ones, and none pays for time that others left unused.
3. A priority or a tenant with no entry is forgotten, and comes back as a new one. It gains nothing by that, as a child
   that waits keeps up with virtual time. A request keeps its tag, because its entries come bit by bit.

A round is a batch or a single entry: `first` and `take` for each of its entries, then `end_round`.
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
"""Weights of the priorities. All tenants, and all requests, have the same weight."""


E = TypeVar("E", bound=Entry)


class QueuedWork(NamedTuple):
    """Amounts that wait, in the whole queue or of one priority."""

    items: int
    requests: int
    tokens: int
    """Tokens without padding."""


class _Node(Generic[E]):
    """A node of the tree. A request's node holds entries, any other has children."""

    __slots__ = (
        "backlog", "children", "entries", "heads", "heaps", "items", "name", "now", "parent", "queued", "requests",
        "served", "start", "tokens", "weight", "weights", "weights_before",
    )  # fmt: skip

    def __init__(self, name: Hashable, parent: _Node[E] | None, *, start: float, now: float, weight: int) -> None:
        self.name = name
        self.parent = parent
        self.weight = weight
        self.start = start
        """Start tag in the virtual time of its parent."""
        self.now = now
        """Virtual time of its children."""
        self.items = self.tokens = self.requests = 0
        """Entries, tokens and requests that wait in its subtree."""
        self.children: dict[Hashable, _Node[E]] = {}
        self.weights = 0
        """Sum of the weights of its children."""
        self.weights_before = 0
        """The same before the round; 0 if the round has taken nothing of it."""
        self.served = 0
        """Tokens that the round has taken of it."""
        self.backlog: dict[Hashable, int] = {}
        """Number of entries in its subtree, by batch key."""
        self.heads: dict[Hashable, int] = {}
        """Tokens of the next entry in its subtree, by batch key."""
        self.heaps: dict[Hashable, list[tuple[float, int, _Node[E]]]] = {}
        """A heap of children by finish tag, for each batch key; some tags are out of date, see `_least`."""
        self.queued: dict[Hashable, float] = {}
        """The finish tag of its valid entry in its parent's heap, by batch key."""
        self.entries: dict[Hashable, deque[tuple[int, E]]] = {}
        """Entries of a request by batch key, each with its arrival number."""

    def finish(self, key: Hashable) -> float:
        """Return the finish tag by its next entry of a key."""
        return self.start + self.heads[key] / self.weight


class FairQueue(Generic[E]):
    """Entries that wait for one resource, such as a device.

    Args:
        name: Name of the resource. A request has a start tag for each.
    """

    def __init__(self, name: Hashable = None) -> None:
        self._name = name
        self._root = _Node[E](None, None, start=0.0, now=0.0, weight=1)
        self._served = 0.0
        """Tokens of all rounds. No virtual time is beyond it."""
        self._touched: list[_Node[E]] = []
        """Nodes that the round has taken entries of, children before parents."""
        self._pushes = count()

    def __len__(self) -> int:
        """Return the number of entries."""
        return self._root.items

    @property
    def waiting(self) -> QueuedWork:
        """Amounts of the whole queue."""
        return QueuedWork(self._root.items, self._root.requests, self._root.tokens)

    def waiting_of(self, priority: Priority) -> QueuedWork:
        """Return the amounts of one priority."""
        node = self._root.children.get(priority)
        return QueuedWork(0, 0, 0) if node is None else QueuedWork(node.items, node.requests, node.tokens)

    @property
    def tenants(self) -> int:
        """Number of tenants with entries. One with entries of both priorities counts twice."""
        return sum(len(priority.children) for priority in self._root.children.values())

    def add(self, entry: E) -> None:
        """Add an entry behind those of its request."""
        key, tokens = entry.batch_key, entry.tokens
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
            at.tokens += tokens
            self._rank(at, key)
            at = at.parent

    def start_tag(self, ticket: Claim) -> float:
        """Return the start tag that the next entry of a request would get now.

        It is in the virtual time of the tenant.
        """
        at = self._root
        for name in (ticket.priority, ticket.tenant):
            if (child := at.children.get(name)) is None:
                return max(self._served, ticket.start_tags.get(self._name, 0.0))
            at = child
        node = at.children.get(ticket)
        return max(at.now, ticket.start_tags.get(self._name, 0.0)) if node is None else node.start + node.tokens

    def first(self, should_keep: Callable[[E], bool], like: E | None = None) -> E | None:
        """Return the first entry in fair order; None if nothing is left.

        Args:
            should_keep: Returns False for an entry to drop. Called for each entry that is looked at.
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
            if should_keep(entry):
                return entry
            self._remove(at, entry)
        return None

    def take(self, entry: E) -> None:
        """Take an entry out of the queue into this round."""
        self._remove(self._request(entry), entry, taken=True)

    def all_of(self, key: Hashable, priority: Priority) -> Iterator[E]:
        """Yield the entries of a key and a priority, in no order."""
        for tenant in self._root.children[priority].children.values():
            for request in tenant.children.values():
                yield from [entry for _, entry in request.entries.get(key, ())]

    def __iter__(self) -> Iterator[E]:
        """Yield all entries, in no order."""
        for priority in self._root.children.values():
            for tenant in priority.children.values():
                for request in tenant.children.values():
                    for entries in request.entries.values():
                        yield from [entry for _, entry in entries]

    def drop(self, entries: Iterable[E]) -> None:
        """Drop entries. Call it between rounds."""
        for entry in entries:
            self._remove(self._request(entry), entry)
        self.end_round()

    def end_round(self) -> None:
        """Advance virtual time by the tokens taken, and forget nodes without entries."""
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
        """Return the tokens that go before the next entry of a request.

        At each level, siblings count for the tokens that they get until its start tag, and for no more than they have.
        """
        path = [self._root]
        for name in (ticket.priority, ticket.tenant, ticket):
            if (child := path[-1].children.get(name)) is None:
                break
            path.append(child)
        tokens = 0.0
        if len(path) <= 3:
            if len(path) == 3:  # its tenant has entries, and it has none
                lead = max(0.0, ticket.start_tags.get(self._name, 0.0) - path[-1].now)
                tokens = min(path[-1].tokens, lead * path[-1].weights)
        else:
            request = path.pop()
            lead = max(0.0, request.start + request.tokens - path[-1].now)
            others = path[-1].weights - request.weight
            tokens = request.tokens + min(path[-1].tokens - request.tokens, lead * others)
        while len(path) > 1:
            node = path.pop()
            parent = path[-1]
            lead = max(0.0, node.start - parent.now) + tokens / node.weight
            tokens += min(parent.tokens - node.tokens, lead * (parent.weights - node.weight))
        return tokens

    def _request(self, entry: E) -> _Node[E]:
        """Return the node of an entry's request, and make it if there is none."""
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
        """Return the child with the least finish tag for these keys."""
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
        """Update the place of a node among its siblings, after a change in its subtree."""
        if key not in node.backlog:
            node.heads.pop(key, None)
            for _, _, child in node.heaps.pop(key, ()):
                child.queued.pop(key, None)
            return
        node.heads[key] = node.entries[key][0][1].tokens if node.entries else self._least(node, (key,)).heads[key]
        if node.parent is not None and (finish := node.finish(key)) < node.queued.get(key, inf):
            node.queued[key] = finish  # a later tag is corrected when it comes first
            heappush(node.parent.heaps.setdefault(key, []), (finish, next(self._pushes), node))

    def _remove(self, request: _Node[E], entry: E, *, taken: bool = False) -> None:
        key, tokens = entry.batch_key, entry.tokens
        entries = request.entries[key]
        place = next(place for place, (_, waiting) in enumerate(entries) if waiting is entry)
        del entries[place]
        if not entries:
            del request.entries[key]
        if taken:
            entry.ticket.start_tags[self._name] = request.start + tokens
        at: _Node[E] | None = request
        is_last = request.items == 1
        while at is not None:
            if not at.weights_before:
                at.weights_before = max(1, at.weights)
                self._touched.append(at)
            if taken:
                at.served += tokens
                at.start += tokens / at.weight
            at.items -= 1
            at.tokens -= tokens
            if is_last and at is not request:
                at.requests -= 1
            if (left := at.backlog[key] - 1) == 0:
                del at.backlog[key]
            else:
                at.backlog[key] = left
            for each in dict.fromkeys((key, *at.backlog)):  # a later start tag changes its order for each key
                self._rank(at, each)
            at = at.parent
