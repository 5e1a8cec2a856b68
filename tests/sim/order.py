"""The order of items to the device, compared with a slow and simple scheduler.

The reference is a tree of plain objects, in which everything is looked up anew for every item. Where the finish tags of
several children are equal any of them may go first.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from staged_pool.stages.scheduling.batch_former import BatchFormer
from staged_pool.stages.scheduling.entries import Batch, BatchTrigger, Priority
from staged_pool.stages.ticket import Item, Ticket
from tests.support.tickets import NoLoad

WEIGHTS = {Priority.INTERACTIVE: 7, Priority.BULK: 1}

QUEUE_IN_BATCHES = 8
"""Waiting tokens, as a multiple of the budget of a batch."""

EPSILON = 1e-9


@dataclass
class Node:
    """Divides its share among its children, by their finish tags. The node of a request has items instead."""

    start: float = 0.0
    weight: int = 1
    now: float = 0.0
    children: dict[Hashable, Node] = field(default_factory=dict)
    items: list[Item[Any]] = field(default_factory=list)
    had: int = 0
    weights: int = 0

    @property
    def waiting(self) -> list[Item[Any]]:
        return self.items + [item for child in self.children.values() for item in child.waiting]

    def next(self, key: Hashable) -> list[Item[Any]]:
        """Return the items of a key that may go next."""
        if not self.children:
            return [item for item in self.items if item.batch_key == key][:1]
        heads = [(child, heads) for child in self.children.values() if (heads := child.next(key))]
        latest = min((max(child.finish(one) for one in heads) for child, heads in heads), default=0.0) + EPSILON
        return [one for child, heads in heads for one in heads if child.finish(one) <= latest]

    def first(self) -> list[Item[Any]]:
        """Return the items that may go first: of the child with the least finish tag by any key."""
        if not self.children:
            return self.items[:1]
        finishes = [
            (child, [[child.finish(one) for one in child.next(key)] for key in child.keys])
            for child in self.children.values()
        ]
        latest = min(min(map(max, of_keys)) for _, of_keys in finishes) + EPSILON
        return [one for child, of_keys in finishes if min(map(min, of_keys)) <= latest for one in child.first()]

    def finish(self, item: Item[Any]) -> float:
        """Return the node's finish tag if this item goes next."""
        return self.start + item.tokens / self.weight

    @property
    def keys(self) -> set[Hashable]:
        return {item.batch_key for item in self.waiting}


class Undecided(Exception):
    """Ambiguous order: several children may go first, with a different virtual time for each."""


@dataclass
class Reference:
    """Hierarchical weighted fair queueing: priorities, their tenants, and the requests of these."""

    root: Node = field(default_factory=Node)
    tags: dict[int, float] = field(default_factory=dict)
    """Start tags of requests, by identity; a request keeps its tag."""
    given: float = 0.0

    def path(self, item: Item[Any]) -> list[Node]:
        ticket, at = item.ticket, self.root
        path = [at]
        for name in (ticket.priority, ticket.tenant, ticket):
            start = max(at.now, self.tags.get(id(ticket), 0.0)) if name is ticket else at.now
            weight = WEIGHTS[ticket.priority] if at is self.root else 1
            at = at.children.setdefault(name, Node(start, weight, self.given))
            path.append(at)
        return path

    def add(self, item: Item[Any]) -> None:
        self.path(item)[-1].items.append(item)

    def take(self, item: Item[Any]) -> None:
        path = self.path(item)
        for node in path:
            node.weights = node.weights or sum(child.weight for child in node.children.values())
            node.had += item.tokens
            node.start += item.tokens / node.weight
        path[-1].items.remove(item)
        self.tags[id(item.ticket)] = path[-1].start

    def end_round(self) -> None:
        self.given += self.root.had
        self._end(self.root)

    def _end(self, node: Node) -> None:
        for name, child in list(node.children.items()):
            self._end(child)
            if not child.waiting:
                del node.children[name]
        if node.had and node.weights:
            heads = [{self._child(node, one).start for one in node.next(key)} for key in node.keys]
            nows = {
                max(node.now + node.had / node.weights, min(node.now + node.had, ahead))
                for ahead in (min(map(min, heads), default=0.0), min(map(max, heads), default=0.0))
            }
            if len(nows) > 1:
                raise Undecided
            node.now = nows.pop()
        node.had = node.weights = 0

    def _child(self, node: Node, item: Item[Any]) -> Node:
        path = self.path(item)
        return path[[each is node for each in path].index(True) + 1]


def check(seed: int) -> str | None:
    """Describe the first difference between scheduler and reference for a seed; None if they agree."""
    try:
        return _check(seed)
    except Undecided:
        return None


def _check(seed: int) -> str | None:
    rng = random.Random(f"order {seed}")
    slots = rng.choice((1, 1, 2))
    former: BatchFormer[Item[int]] = BatchFormer(
        max_items=rng.choice((1, 3, 16)),
        max_batch_tokens=rng.choice((10, 40)),
        min_batch_tokens=rng.choice((3, 10)),
        pads=False,
        slots=slots,
    )
    reference = Reference()
    bulk, tenants, keys = rng.choice((0.0, 0.3, 0.7)), rng.choice((1, 2, 4)), rng.choice((1, 1, 2))
    tickets = [_ticket(rng, bulk, tenants) for _ in range(rng.randint(1, 8))]
    for _ in range(rng.randint(4, 20)):
        for number in range(rng.choice((0, 1, 1, 5))):
            item = Item(rng.choice(tickets), 0, number, 0.0, rng.choice((1, 2, 5, 12)), rng.randrange(keys))
            former.queue.add(item)
            reference.add(item)
        for ticket in tickets:
            if not 0 <= (ahead := former.queue.ahead(ticket)) <= (tokens := former.queue.waiting.tokens):
                return f"{ahead} of {tokens} tokens are ahead of a request"
        running = rng.choice((0, 0, 5, 20))
        if rng.random() < 0.7 and (wrong := _compare(former, reference, running, slots)) is not None:
            return wrong
    while former.queue:
        if (wrong := _compare(former, reference, 0, slots)) is not None:
            return wrong
    return None


def _ticket(rng: random.Random, bulk: float, tenants: int) -> Ticket:
    nothing: Callable[..., Any] = lambda *_: None  # noqa: E731
    priority = Priority.BULK if rng.random() < bulk else Priority.INTERACTIVE
    return Ticket(nothing, nothing, NoLoad(), priority=priority, tenant=rng.randrange(tenants) or None)


def _compare(former: BatchFormer[Item[int]], reference: Reference, running: int, slots: int) -> str | None:
    waiting, least = reference.root.waiting, former._min_batch_tokens

    def queued(items: list[Item[Any]]) -> int:
        return min(sum(item.tokens for item in items), len({item.ticket for item in items}) * least)

    budget = min(former.max_batch_tokens, max(least, queued(waiting) // QUEUE_IN_BATCHES))
    is_full = queued([item for item in waiting if item.ticket.priority is Priority.INTERACTIVE]) > budget
    if former.has_full_batch != is_full:
        return f"so much waits that a batch may be cut ahead: {former.has_full_batch}"
    limit = min(budget, ceil((former.queue.waiting.tokens + running) / slots)) if running else budget
    batch = former.take(lambda _: True, running)
    if batch is None:
        return "nothing goes, and something waits" if waiting else None
    taken = _following(reference, list(batch.items))
    if taken is None:
        return f"of {len(batch.items)} items that go some have their turn later"
    reference.__dict__.update(taken.__dict__)
    wrong = _compare_end(batch, reference, limit, former.max_items)
    reference.end_round()
    return wrong


def _following(reference: Reference, left: list[Item[int]], key: Hashable = None) -> Reference | None:
    """Return the reference after these items, taken in any permitted order; None if none is permitted."""
    if not left:
        return reference
    allowed = reference.root.next(key) if key is not None else reference.root.first()
    for one in allowed:
        if any(one is item for item in left):
            forked = _fork(reference) if len(allowed) > 1 else reference
            forked.take(one)
            if (end := _following(forked, [item for item in left if item is not one], one.batch_key)) is not None:
                return end
    return None


def _fork(reference: Reference) -> Reference:
    def fork(node: Node) -> Node:
        twin = copy.copy(node)
        twin.items = list(node.items)
        twin.children = {name: fork(child) for name, child in node.children.items()}
        return twin

    return Reference(fork(reference.root), dict(reference.tags), reference.given)


def _compare_end(batch: Batch[Item[int]], reference: Reference, limit: int, most_items: int) -> str | None:
    """Check the end of a batch, after the reference has taken its items."""
    tokens = sum(item.tokens for item in batch.items)
    if tokens > limit and len(batch.items) > 1:
        return f"a batch of {tokens} tokens, and {limit} are to be had"
    following = reference.root.next(batch.items[0].batch_key)
    if len(batch.items) < most_items and following and all(tokens + one.tokens <= limit for one in following):
        return f"a batch of {tokens} tokens, {limit} are to be had, and more could have gone"
    if not following and batch.trigger is not BatchTrigger.DEMAND:
        return f"all have gone, and the batch was cut by its {batch.trigger}"
    return None
