"""A world of fronts, as a JSON value, and the world of a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TICK_S = 0.001


@dataclass(slots=True)
class RequestPlan:
    front: int = 0
    arrives_at: float = 0.0
    items: list[str] = field(default_factory=lambda: ["a"])
    """Letters of each input. One with NaN in it fails on the device, and an empty one in preprocess."""
    images: bool = False
    """The inputs are images."""
    timeout_s: float = math.inf
    leaves_at: float = math.inf
    bulk: bool = False
    tenant: str | None = None
    waits: bool = False
    """It waits for room instead of being rejected."""
    streams: bool = False
    is_large: bool = False
    """Its body is decoded in a thread."""


@dataclass(slots=True)
class EndPlan:
    """The end of a line, or of a process."""

    at: float = 0.0
    front: int | None = None
    """Its line is cut. None: the engine process dies, and another one is started."""
    dies: bool = False
    """The front dies, too."""


@dataclass(slots=True)
class LiarPlan:
    """A front that lies; see `liar.py`."""

    at: float = 0.0
    requests: int = 1
    """Requests that it speaks of."""
    lies: float = 0.5
    """Part of its messages that is corrupted."""
    stays_s: float = 0.0
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class LineWorld:
    seed: int = 0
    fronts: int = 1
    requests: list[RequestPlan] = field(default_factory=list)
    ends: list[EndPlan] = field(default_factory=list)
    liars: list[LiarPlan] = field(default_factory=list)
    absent_s: float = 0.01
    """Seconds until there is another line, or another engine process."""
    max_requests: int = 64
    channel_capacity: int = 2
    waiting_tokens: int = 1000
    max_batch_items: int = 16
    coalesce: bool = True
    result_cache: bool = False
    preprocess_ticks: int = 0
    device_ticks: int = 1
    pieces: int = 1 << 16
    """Most bytes that the stream takes or gives at once."""
    wire_ticks: int = 0
    """Most ticks that each piece is under way."""
    kernel_bytes: int = 1 << 20
    """Bytes that are on their way at most; a sender waits for room."""
    ring_bytes: int = 0
    """Size of the rings; all arrays go through them. 0: none do."""
    drains_at: float = math.inf
    """Time at which the first front drains."""


def from_json(given: Mapping[str, Any]) -> LineWorld:
    """Read a world."""
    plain = dict(given)
    requests = [RequestPlan(**request) for request in plain.pop("requests", [])]
    ends = [EndPlan(**end) for end in plain.pop("ends", [])]
    liars = [LiarPlan(**liar) for liar in plain.pop("liars", [])]
    return LineWorld(requests=requests, ends=ends, liars=liars, **plain)


def draw(seed: int) -> LineWorld:
    """Return the world of a seed, always the same one."""
    rng = random.Random(f"{seed} lines")
    some = rng.choice
    world = LineWorld(
        seed=seed,
        fronts=some([1, 2, 2, 3]),
        absent_s=some([0.0, 0.003, 0.02]),
        max_requests=some([1, 2, 64, 64]),
        channel_capacity=some([1, 1, 2, 4]),
        waiting_tokens=some([4, 20, 1000]),
        max_batch_items=some([1, 3, 16]),
        coalesce=rng.random() < 0.7,
        result_cache=rng.random() < 0.3,
        preprocess_ticks=some([0, 1, 4]),
        device_ticks=some([0, 1, 5]),
        pieces=some([7, 64, 1 << 16]),
        wire_ticks=some([0, 0, 2]),
        kernel_bytes=some([256, 1 << 20]),
        ring_bytes=some([0, 4096, 4096, 65536]),
    )
    for _ in range(rng.randint(1, 12)):
        letters = ["a", "bc", "ccc", "dddddddd", "NaN", ""] if rng.random() < 0.3 else ["a", "bc", "dddddddd"]
        texts = [some(letters) for _ in range(some([1, 1, 3, 12]))]
        plan = RequestPlan(rng.randrange(world.fronts), rng.randint(0, 20) * TICK_S, texts)
        plan.images, plan.bulk, plan.streams = rng.random() < 0.4, rng.random() < 0.3, rng.random() < 0.2
        if plan.images:  # an image of no letters is none
            plan.items = [text or "a" for text in texts]
        plan.tenant, plan.waits = some([None, None, "a", "b"]), rng.random() < 0.4
        if rng.random() < 0.2:
            plan.timeout_s = rng.randint(1, 60) * TICK_S
        if rng.random() < 0.3:
            plan.leaves_at = plan.arrives_at + rng.randint(0, 40) * TICK_S
        world.requests.append(plan)
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 3)):
            front = some([None, *range(world.fronts)])
            dies = front is not None and rng.random() < 0.3
            world.ends.append(EndPlan(rng.randint(1, 40) * TICK_S, front, dies))
    if rng.random() < 0.1:
        world.drains_at = rng.randint(0, 30) * TICK_S
    for plan in world.requests:
        plan.is_large = rng.random() < 0.3
    if rng.random() < 0.5:
        world.liars = [
            LiarPlan(
                at=rng.randint(0, 20) * TICK_S,
                requests=rng.randint(1, 4),
                lies=some([0.0, 0.1, 0.5]),
                stays_s=rng.randint(0, 20) * TICK_S,
                seed=rng.randrange(1 << 30),
            )
            for _ in range(rng.randint(1, 3))
        ]
    return world
