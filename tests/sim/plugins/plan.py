"""A world of a plugin, as a JSON value, and the world of a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Fault: TypeAlias = Literal["raises", "rejects", "panics", "exits", "strays", "hangs", "endless"]
"""The end of a hook. `rejects` is an error for the caller, `strays` lets out a cancellation that nobody has asked for,
and `endless` gives a generator without end."""

HOOKS = ("parse", "load", "preprocess", "postprocess")
"""Hooks in their order; `tokens` and `forward` come between the last two."""

PLACES = ("parse", "load", "preprocess", "tokens", "forward", "postprocess")
"""Places of faults, in the order in which a request passes them."""

TICK_S = 0.001


@dataclass(slots=True)
class RequestPlan:
    arrives_at: float = 0.0
    parts: int = 1
    """Model inputs that `preprocess` makes."""
    faults: dict[str, Fault] = field(default_factory=dict)
    """Faults by place."""
    timeout_s: float = math.inf
    leaves_at: float = math.inf


@dataclass(slots=True, kw_only=True)
class PluginWorld:
    seed: int = 0
    awaited: list[str] = field(default_factory=list)
    """Hooks that are coroutine functions."""
    ticks: int = 1
    """Most ticks of a hook."""
    requests: list[RequestPlan] = field(default_factory=list)
    max_request_items: int = 8
    preprocess_limit: int = 2
    media_limit: int = 2
    end_fault: Fault | None = None
    """Fault of the hooks at the end of a request or of the plugin."""
    stops_at: float = math.inf
    """Time at which the host cancels the engine."""


def from_json(given: Mapping[str, Any]) -> PluginWorld:
    """Read a world."""
    plain = dict(given)
    requests = [RequestPlan(**request) for request in plain.pop("requests", [])]
    return PluginWorld(requests=requests, **plain)


def draw(seed: int) -> PluginWorld:
    """Return the world of a seed, always the same one."""
    rng = random.Random(f"{seed} plugins")
    some = rng.choice
    world = PluginWorld(
        seed=seed,
        awaited=[hook for hook in HOOKS if rng.random() < 0.5],
        ticks=some([0, 1, 4]),
        max_request_items=some([3, 8]),
        preprocess_limit=some([1, 2]),
        media_limit=some([1, 2, 8]),
        end_fault=some([None, None, "raises", "panics", "exits", "strays"]),
    )
    if rng.random() < 0.1:
        world.stops_at = rng.randint(0, 20) * TICK_S
    for _ in range(rng.randint(1, 6)):
        plan = RequestPlan(rng.randint(0, 6) * TICK_S, some([0, 1, 1, 3]))
        if rng.random() < 0.2:
            plan.timeout_s = rng.randint(1, 30) * TICK_S
        if rng.random() < 0.2:
            plan.leaves_at = plan.arrives_at + rng.randint(0, 20) * TICK_S
        if rng.random() < 0.5:
            place = some(PLACES)
            plan.faults = {place: _fault(rng, place, world, plan)}
        world.requests.append(plan)
    return world


def _fault(rng: random.Random, place: str, world: PluginWorld, plan: RequestPlan) -> Fault:
    faults: list[Fault] = ["raises", "rejects", "panics", "exits", "strays"]
    if place in ("preprocess", "forward"):
        faults += ["endless", "endless"]
    if place in world.awaited and min(plan.timeout_s, plan.leaves_at) < math.inf:
        faults += ["hangs", "hangs"]
    return rng.choice(faults)
