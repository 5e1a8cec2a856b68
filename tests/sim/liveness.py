"""Bounds on waits that follow from the world's own service times.

They hold in worlds in which nothing goes wrong (`World.liveness`), for every request that was answered:

- It waits at most `PATIENCE` times its duration alone, together with its fair part of the others. That is, of each
  request that is in flight at the same time, as much as itself has and one item more; of each other tenant no more than
  its own tenant has meanwhile; beside interactive work a seventh of bulk work, and seven times as much the other way.
- While nothing runs, nothing waits for more than `UNATTENDED_S` (`Watch._look`); and while the device is idle, nothing
  waits for it for longer than that and the fixed time of a forward (`Watch.batch_formed`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tests.sim.answers import parts
from tests.sim.outcomes import RESULTS
from tests.sim.watch import Watch
from tests.sim.world import TICK_S, ClientPlan, World

PATIENCE = 3.0

INTERACTIVE_PER_BULK = 7


@dataclass(frozen=True, slots=True)
class _Work:
    """The work of one request on the device, in seconds."""

    client: ClientPlan
    began: float
    ended: float
    device_s: float
    tokens: int

    def overlaps(self, other: _Work) -> bool:
        return self.began <= other.ended and other.began <= self.ended


def check(watch: Watch) -> None:
    """Check that each answered request waited no longer than its bound."""
    world = watch.world
    works = list(_works(watch))
    for work in works:
        bound_s = PATIENCE * fair_s(world, work, [one for one in works if one is not work and work.overlaps(one)])
        took_s = work.ended - work.began
        if took_s > bound_s:
            watch.fail(f"client {work.client.number} waited for {took_s:.3g} s; its fair part is {bound_s:.3g} s")


def _works(watch: Watch) -> Iterator[_Work]:
    world = watch.world
    for client in world.clients:
        if not isinstance(watch.outcomes.get(client.number), RESULTS) or client.number not in watch.tickets:
            continue
        ticket = watch.tickets[client.number]
        began, ended = client.arrives_at, ticket.times[0]
        token_counts = [item.tokens for item in client.items for _ in range(parts(world, client, item))]
        yield _Work(client, began, ended, sum(forward_s(world, tokens) for tokens in token_counts), sum(token_counts))


def forward_s(world: World, tokens: int) -> float:
    """Maximum seconds of a forward of `tokens` tokens."""
    return world.forward_s + world.token_s * tokens + world.device_ticks * TICK_S + _aligned_s(world)


def _aligned_s(world: World) -> float:
    return world.align_ticks * TICK_S


def _share_s(world: World, of: _Work, tokens: int) -> float:
    """Return a request's device time up to a number of tokens, and one item more."""
    taken, seconds = 0, 0.0
    for item in of.client.items:
        for _ in range(parts(world, of.client, item)):
            seconds += forward_s(world, item.tokens)
            taken += item.tokens
            if taken > tokens:
                return seconds
    return seconds


def _fetch_s(client: ClientPlan) -> float:
    return sum(fetch.takes_s for item in client.items for fetch in item.fetches)


def fair_s(world: World, work: _Work, others: list[_Work]) -> float:
    """Return a request's time alone and its fair part of the others, in seconds."""
    config, client = world.config, work.client
    largest = max(config.batch_tokens("cpu"), *(item.tokens for item in world.contents.values()))
    begun_s = (2 * world.slots + 2) * forward_s(world, largest)
    """Seconds of batches that run, are queued, or are cut, in both lanes."""
    own = {True: 0.0, False: 0.0}
    of_others: defaultdict[tuple[bool, str | None], float] = defaultdict(float)
    for other in others:
        share_s = _share_s(world, other, work.tokens)
        if other.client.tenant == client.tenant and other.client.bulk == client.bulk:
            own[client.bulk] += share_s
        else:
            of_others[other.client.bulk, other.client.tenant] += other.device_s
    mine_s = work.device_s + own[client.bulk]
    beside_s = {
        bulk: sum(
            min(seconds, mine_s + forward_s(world, largest))
            for (is_bulk, _), seconds in of_others.items()
            if is_bulk is bulk
        )
        for bulk in (True, False)
    }
    same_s = mine_s + beside_s[client.bulk]
    across_s = beside_s[not client.bulk]
    limit_s = same_s * INTERACTIVE_PER_BULK if client.bulk else same_s / INTERACTIVE_PER_BULK
    device_s = same_s + min(across_s, limit_s + forward_s(world, largest)) + begun_s
    lists = -(-len(client.items) // config.chunk_items)
    before = len(others) + config.channel_capacity + 2
    call_s = world.preprocess_ticks * TICK_S + _aligned_s(world)
    codec_s = (len(others) / 2 + 2) * (world.codec_ticks * TICK_S + _aligned_s(world))
    fetch_s = sum(_fetch_s(each.client) for each in (work, *others))  # first come, first served
    return device_s + lists * before * call_s + codec_s + fetch_s + 2 * TICK_S
