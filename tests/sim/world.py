"""What one seed decides: the engine's settings, who asks for what and when, and everything that goes wrong.

Each kind of trouble is present in some worlds only, because a world with all of them hides one behind another. Times
lie on a grid, so that many things happen at the same moment and the scheduler decides which is first. Most worlds are
small: nearly every bug needs but a few requests that meet, and in the time of one large world several small ones do.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import Literal

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import Lane
from staged_pool.stages.supervise import RestartPolicy
from staged_pool.stages.work import Priority

ItemFault = Literal["invalid", "preprocess raises", "forward raises", "nan", "out of memory"]
CodecFault = Literal["raises", "refuses"]
FetchFault = Literal["unusable", "unavailable", "raises"]
End = Literal["quiet", "leave", "raise", "cancel", "native cancel"]
"""How the engine's block ends: after everything is done; or at some moment by leaving it, by an error of the host, by a
scope of the host, or by asyncio's own cancellation of the host's task."""

SEAMS = (
    "parse.received",
    "preprocess.received",
    "preprocess.prepared",
    "batch.received",
    "batch.formed",
    "batch.computed",
    "postprocess.received",
    "postprocess.encoded",
)

IMAGE_SEAMS = (
    "preprocess_images.received",
    "preprocess_images.prepared",
    "batch_images.received",
    "batch_images.formed",
    "batch_images.computed",
)

MOST_HANGING = 5
"""Fetches that hang: with one at a time, more of them would take a world longer than it may last."""

TICK_S = 0.001


@dataclass(slots=True)
class FetchPlan:
    """What becomes of the fetch of one picture."""

    takes_s: float
    fault: FetchFault | None


@dataclass(slots=True)
class ItemPlan:
    cost: int
    key: str | None
    fault: ItemFault | None
    pictures: int = 0
    """None: a text. One: a picture by itself. Several: those of a conversation."""
    fetches: dict[int, FetchPlan] = field(default_factory=dict)
    """By picture: those that are given as URLs."""
    like: tuple[int, int] | None = None
    """Which item it repeats: the number of that one's client, and its index there. None: it is like no other."""

    @property
    def lane(self) -> Lane:
        return "image" if self.pictures else "text"


@dataclass(slots=True, kw_only=True)
class ClientPlan:
    """One caller. Times are virtual seconds since the start; `math.inf` is never."""

    number: int
    arrives_at: float
    items: list[ItemPlan]
    body_bytes: int
    timeout_s: float = math.inf
    host_timeout_s: float = math.inf
    """Of a scope of its own around the call."""
    leaves_at: float = math.inf
    native: bool = False
    """On asyncio, it is cancelled by `Task.cancel` rather than by a scope."""
    decode: CodecFault | None = None
    encode: CodecFault | None = None
    priority: Priority = Priority.INTERACTIVE
    tenant: str | None = None
    salt: str | None = None
    """Of the request's `cache_salt`."""
    tokenizes: bool = False
    """It calls `tokenize` and not `submit`."""


@dataclass(slots=True, kw_only=True)
class World:
    seed: int
    config: EngineConfig
    restarts: RestartPolicy
    parse_workers: int
    postprocess_workers: int
    pads: bool
    lanes: tuple[Lane, ...] = ("text",)
    slots: int = 1
    """Batches on the device at once, of each lane."""
    min_share_tokens: int = 1
    cores: int | None = None
    """That forwards share with preprocess."""
    clients: list[ClientPlan]
    crashes: set[tuple[str, int]] = field(default_factory=set)
    """A seam, and which time it is reached."""
    delays: dict[tuple[str, int], float] = field(default_factory=dict)
    yields: bool = False
    """Whether each seam lets the other tasks run."""
    preprocess_ticks: int = 1
    device_ticks: int = 1
    codec_ticks: int = 1
    slow_preprocess: dict[int, float] = field(default_factory=dict)
    """Which call takes how long instead."""
    slow_device: dict[int, float] = field(default_factory=dict)
    lost_at_call: int | None = None
    """At which call the device says that it cannot be trusted any more."""
    out_of_memory_above: int | None = None
    """Payloads of one forward."""
    drains: list[tuple[float, float]] = field(default_factory=list)
    """When, and for how long."""
    end: End = "quiet"
    ends_at: float = 0.0


def draw(seed: int) -> World:
    """The world of a seed; the same one every time."""
    rng = random.Random(seed * 7919 + 1)
    chance = rng.random

    def ticks(most: int) -> float:
        return rng.randint(0, most) * TICK_S

    small = chance() < 0.5
    """Whether limits are so tight that they matter."""
    config = EngineConfig(
        preprocess_limit=rng.choice((1, 1, 2, 4)),
        max_batch_tokens=rng.choice((4, 12, 30, 100)),
        max_batch_items=rng.choice((1, 2, 4, 8, 16)),
        chunk_items=rng.choice((1, 1, 2, 3, 8)),
        channel_capacity=rng.choice((1, 1, 2, 3)),
        waiting_tokens=rng.choice((1, 5, 20, 100)),
        request_waiting_tokens=rng.choice((1, 5, 20, 100)),
        max_requests=rng.choice((3, 8)) if small and chance() < 0.2 else 1000,
        max_items=rng.choice((5, 20)) if small and chance() < 0.2 else 1000,
        max_tokens=rng.choice((20, 60)) if small and chance() < 0.2 else 10**6,
        max_bytes=rng.choice((100, 400)) if small and chance() < 0.2 else 2**28,
        max_request_items=6 if small and chance() < 0.2 else 1000,
        target_delay_s=rng.choice((0.005, 0.02, 0.1)) if small and chance() < 0.2 else 1000.0,
        drain_timeout_s=rng.choice((0.0, 0.003, 0.02, 1.0, 30.0)),
        watchdog_s=5.0,
        preprocess_alarm_s=rng.choice((2.0, 20.0)),
    )
    world = World(
        seed=seed,
        config=config,
        restarts=RestartPolicy(
            max_crashes=rng.choice((0, 2, 8, 8, 8)), window_s=60.0, first_delay_s=rng.choice((0.0, 0.001, 0.05))
        ),
        parse_workers=rng.choice((1, 1, 2, 3)),
        postprocess_workers=rng.choice((1, 1, 2)),
        pads=chance() < 0.5,
        clients=[],
        yields=chance() < 0.2,
        preprocess_ticks=rng.choice((0, 1, 3, 8)),
        device_ticks=rng.choice((0, 1, 3, 8)),
        codec_ticks=rng.choice((0, 2, 5)),
    )
    span = rng.choice((1, 3, 10, 30))
    """Ticks within which the clients arrive."""
    _draw_clients(rng, world, span)
    _draw_troubles(rng, world, span)
    if chance() < 0.3:
        world.end = rng.choice(("leave", "leave", "raise", "cancel", "native cancel"))
        world.ends_at = ticks(span * 3 + 8)
    if chance() < 0.12:
        for _ in range(rng.choice((1, 1, 2, 3))):
            world.drains.append((ticks(span * 3 + 8), rng.choice((0.0, 0.002, 0.01, 0.5, 30.0))))
    world.slots = rng.choice((1, 1, 2, 2, 3))
    world.min_share_tokens = rng.choice((1, 4, 12))
    _draw_pictures(random.Random(seed * 7919 + 2), world)
    _draw_repetitions(random.Random(seed * 7919 + 3), world)
    _draw_askers(random.Random(seed * 7919 + 4), world)
    _draw_crowd(random.Random(seed * 7919 + 5), world)
    world.cores = random.Random(seed * 7919 + 6).choice((None, 1, 2, 3))
    return world


def _draw_repetitions(rng: random.Random, world: World) -> None:
    """Have some items be like others. From numbers of its own, as the pictures are."""
    chance = rng.random
    if chance() < 0.3:
        return
    world.config = replace(world.config, coalesce=chance() < 0.9, result_cache_mb=rng.choice((0, 0, 1)))
    share = rng.choice((0.1, 0.5, 0.9))
    originals: dict[Lane, list[tuple[int, int]]] = {"text": [], "image": []}
    for client in world.clients:
        for index, item in enumerate(client.items):
            alike = originals[item.lane]
            if alike and chance() < share:
                item.like = rng.choice(alike[-4:])
                original = _item(world, item.like)
                item.cost, item.key, item.fault = original.cost, original.key, original.fault
                item.pictures = original.pictures
                item.fetches = {place: plan for place, plan in item.fetches.items() if place < item.pictures}
            else:
                alike.append((client.number, index))
    world.config = replace(world.config, share_between_tenants=chance() < 0.6)
    salted = rng.choice((0.0, 0.0, 0.3))
    for client in world.clients:
        client.salt = rng.choice(("salt", "pepper")) if chance() < salted else None


def _item(world: World, name: tuple[int, int]) -> ItemPlan:
    return world.clients[name[0]].items[name[1]]


def _draw_askers(rng: random.Random, world: World) -> None:
    """Say whose requests they are, and which of them may wait. From numbers of its own, as pictures."""
    if rng.random() < 0.3:
        return
    tenants = rng.choice(((None,), ("a", "b"), ("a", "a", "a", "b"), (None, "a", "b", "c")))
    bulk = rng.choice((0.0, 0.2, 0.5, 1.0))
    for client in world.clients:
        client.tenant = rng.choice(tenants)
        if rng.random() < bulk:
            client.priority = Priority.BULK


def _draw_crowd(rng: random.Random, world: World) -> None:
    """In a few worlds, have a crowd ask a handful of questions of a device that is slow, and some of it leave without
    an answer. Of items that are alike one goes for all; the others are passed over, follow it, or inherit its place:
    the worlds above seldom get to the last of these steps, so nothing else goes wrong here."""
    if rng.random() >= 0.025:
        return
    world.lanes, world.pads, world.slots, world.device_ticks = ("text",), True, 1, 8
    world.end = "quiet"
    world.crashes, world.delays, world.drains = set(), {}, []
    world.config = replace(
        world.config,
        max_batch_items=1,
        max_batch_tokens=rng.choice((6, 12)),
        waiting_tokens=100,
        request_waiting_tokens=100,
        coalesce=True,
        share_between_tenants=True,
        result_cache_mb=0,
    )
    tenants = rng.choice(((None, "a"), ("a", "b", "c", "d")))
    asked: dict[int, tuple[int, int]] = {}
    for client in world.clients:
        client.arrives_at = rng.randint(0, 4) * TICK_S
        client.timeout_s = client.host_timeout_s = math.inf
        client.leaves_at = client.arrives_at + rng.randint(5, 30) * TICK_S if rng.random() < 0.6 else math.inf
        client.tenant, client.salt = rng.choice(tenants), None
        client.items = []
        for index in range(rng.choice((1, 1, 2))):
            question = rng.randint(1, 6)
            client.items.append(ItemPlan(question, None, None, like=asked.get(question)))
            asked.setdefault(question, (client.number, index))


def _draw_pictures(rng: random.Random, world: World) -> None:
    """Turn some texts into pictures. From numbers of its own: a world without any is as if there were none anywhere."""
    chance = rng.random
    if chance() < 0.5:
        return
    world.lanes = ("text", "image") if chance() < 0.9 else ("image",)
    share = rng.choice((0.1, 0.5, 0.9)) if "text" in world.lanes else 1.0
    urls = rng.choice((0.0, 0.3, 0.3, 1.0))
    faulty = rng.choice((0.0, 0.0, 0.05, 0.2))
    slowest = rng.choice((0, 3, 20))
    hangs = rng.choice((0.0, 0.0, 0.1))
    mixed = chance() < 0.5
    hanging = 0
    fault: FetchFault | None
    for client in world.clients:
        shows = chance() < share
        for item in client.items:
            if not (chance() < share if mixed and "text" in world.lanes else shows):
                continue
            item.pictures = rng.choice((1, 1, 1, 2, 3))
            for place in range(item.pictures):
                if chance() < urls:
                    takes_s, fault = rng.randint(0, slowest) * TICK_S, None
                    if chance() < hangs and hanging < MOST_HANGING:
                        hanging += 1
                        takes_s, fault = 20.0, "unavailable"  # as every fetch that hangs, when its time is up
                    elif chance() < faulty:
                        fault = rng.choice(("unusable", "unavailable", "raises"))
                    item.fetches[place] = FetchPlan(takes_s, fault)
    world.config = replace(
        world.config, image_preprocess_limit=rng.choice((1, 1, 2)), media_limit=rng.choice((1, 2, 16))
    )
    if world.crashes:
        for _ in range(rng.choice((1, 2, 4))):
            world.crashes.add((rng.choice(IMAGE_SEAMS), rng.choice((0, 0, 1, 1, 2, 3, 5, 8))))
    if world.delays:
        for _ in range(rng.choice((1, 3))):
            world.delays[rng.choice(IMAGE_SEAMS), rng.randint(0, 9)] = rng.choice((1, 3, 10, 50)) * TICK_S


def _draw_clients(rng: random.Random, world: World, span: int) -> None:
    chance = rng.random
    poison = rng.choice((0.0, 0.0, 0.03, 0.15))
    faults: tuple[ItemFault, ...] = ("invalid", "preprocess raises", "forward raises", "nan", "out of memory")
    timeouts, leavers = rng.choice((0.0, 0.0, 0.3, 0.7)), rng.choice((0.0, 0.0, 0.3, 0.6))
    codec_faults = rng.choice((0.0, 0.0, 0.1))
    tokenizers = rng.choice((0.0, 0.0, 0.0, 0.2))
    keys = rng.choice(((None,), (None,), ("a", "b")))
    most_items = rng.choice((1, 1, 2, 3, 3, 5, 5, 10))
    for number in range(16 if chance() < 0.03 else rng.choice((2, 3, 3, 4, 4, 5, 6, 8))):
        arrives_at = rng.randint(0, span) * TICK_S
        items = [
            ItemPlan(rng.randint(1, 6), rng.choice(keys), rng.choice(faults) if chance() < poison else None)
            for _ in range(rng.randint(1, most_items))
        ]
        client = ClientPlan(
            number=number,
            arrives_at=arrives_at,
            items=items,
            body_bytes=rng.choice((0, 10, 40, 100, 40_000)) if chance() < 0.5 else 4 * sum(i.cost for i in items),
        )
        if chance() < timeouts:
            client.timeout_s = rng.choice((1, 2, 5, 10, 30, 200)) * TICK_S
        if chance() < timeouts * 0.3:
            client.host_timeout_s = rng.choice((1, 2, 5, 10, 30)) * TICK_S
        if chance() < leavers:
            client.leaves_at = arrives_at + rng.choice((0, 1, 2, 3, 5, 8, 15, 30)) * TICK_S
            client.native = chance() < 0.5
        if chance() < codec_faults:
            client.decode = rng.choice(("raises", "refuses"))
        if chance() < codec_faults:
            client.encode = rng.choice(("raises", "refuses"))
        client.tokenizes = chance() < tokenizers
        world.clients.append(client)


def _draw_troubles(rng: random.Random, world: World, span: int) -> None:
    chance = rng.random
    if chance() < 0.4:
        seams = [rng.choice(SEAMS)] if chance() < 0.5 else SEAMS
        for _ in range(rng.choice((1, 2, 4, 10))):
            world.crashes.add((rng.choice(seams), rng.choice((0, 0, 1, 1, 2, 3, 5, 8))))
    if chance() < 0.3:
        for _ in range(rng.choice((1, 3, 8))):
            world.delays[rng.choice(SEAMS), rng.randint(0, 9)] = rng.choice((1, 3, 10, 50)) * TICK_S
    if chance() < 0.2:
        for _ in range(rng.choice((1, 2, 4))):
            world.slow_preprocess[rng.randint(0, 7)] = rng.choice((0.05, 1.0, 10.0))
        if chance() < 0.5:
            world.slow_preprocess[rng.randint(0, 7)] = 100.0  # hangs, until something lets go of it
    if chance() < 0.15:
        world.slow_device[rng.randint(0, 7)] = rng.choice((0.05, 1.0, 3.0))
    if chance() < 0.08:
        world.slow_device[rng.randint(0, 7)] = rng.choice((5.5, 50.0))
    if chance() < 0.08:
        world.lost_at_call = rng.randint(0, 5)
    if chance() < 0.2:
        world.out_of_memory_above = rng.choice((1, 2, 3, 5))
