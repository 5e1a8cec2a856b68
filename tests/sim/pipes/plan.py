"""A world of a pipeline, as a JSON value, and the world of a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["one", "other", "function", "expand", "best"]
"""A stage: either engine, a function, one that makes several of an item, or a score of which the best go on."""

SourceFault = Literal["raises", "strays", "panics", "exits"]

FUNCTION_FAULTS = ("!raises", "!strays", "!panics", "!exits")
"""Texts for which every function fails. The first is an error of its own."""

GENERATOR_FAULTS = ("!endless", *(f"!yields, {fault[1:]}" for fault in FUNCTION_FAULTS))
"""Texts for which an expanding function has a bad generator: one without an end, or one that fails."""

HANGS = "!hangs"
"""Text for which a plain function hangs, for longer than any request waits."""

TICK_S = 0.001


@dataclass(slots=True)
class StagePlan:
    kind: Kind = "one"
    window: int | None = None
    ticks: int = 0
    """Most ticks of a function."""
    skips: bool = False
    """Items that fail are skipped."""
    top_k: int = 2
    plain: bool = False
    """The function runs in a thread."""
    parts: int = 2
    """Items that an expanding stage makes of one; it may make one more."""


@dataclass(slots=True)
class RequestPlan:
    arrives_at: float = 0.0
    items: list[str] = field(default_factory=lambda: ["a"])
    """Texts. One with NaN in it fails in an engine, and one with v in it vanishes in a function. Others are bad."""
    timeout_s: float = math.inf
    leaves_at: float = math.inf
    bulk: bool = False
    tenant: str | None = None
    streams: bool = False
    source: Literal["list", "plain", "awaited"] = "list"
    """The items come in a list, of a generator, or of an asynchronous one."""
    source_fault: SourceFault | None = None
    """The error by which a generator ends, behind its items."""


@dataclass(slots=True, kw_only=True)
class PipeWorld:
    seed: int = 0
    stages: list[StagePlan] = field(default_factory=lambda: [StagePlan()])
    requests: list[RequestPlan] = field(default_factory=list)
    window: int = 4
    max_requests: int = 8
    engine_requests: int = 2
    """Most requests in each engine."""
    target_delay_s: float = 1000.0
    device_ticks: int = 1
    drains_at: float = math.inf
    drain_s: float = 0.0


def from_json(given: Mapping[str, Any]) -> PipeWorld:
    """Read a world."""
    plain = dict(given)
    stages = [StagePlan(**stage) for stage in plain.pop("stages", [{}])]
    requests = [RequestPlan(**request) for request in plain.pop("requests", [])]
    return PipeWorld(stages=stages, requests=requests, **plain)


def draw(seed: int) -> PipeWorld:
    """Return the world of a seed, always the same one."""
    rng = random.Random(f"{seed} pipes")
    some = rng.choice
    world = PipeWorld(
        seed=seed,
        window=some([1, 2, 4, 16]),
        max_requests=some([1, 2, 8, 8]),
        engine_requests=some([1, 2, 64]),
        target_delay_s=some([0.001, 1000.0]),
        device_ticks=some([0, 1, 5]),
    )
    kinds: list[Kind] = ["one", "one", "other", "function", "expand", "best"]
    world.stages = [
        StagePlan(some(kinds), some([None, 1, 3]), some([0, 2, 6]), rng.random() < 0.4, some([1, 3]))
        for _ in range(rng.randint(1, 4))
    ]
    hostile = rng.random() < 0.5
    for stage in world.stages:
        stage.plain = rng.random() < 0.4
        stage.parts = some([2, 2, 6])
    for _ in range(rng.randint(1, 7)):
        texts = [
            some(["a", "bc", "ccc", "NaN", "v"] if rng.random() < 0.3 else ["a", "bc"]) for _ in range(some([1, 3, 12]))
        ]
        if hostile and rng.random() < 0.5:
            texts[rng.randrange(len(texts))] = some([*FUNCTION_FAULTS, *GENERATOR_FAULTS, "!endless", HANGS])
        plan = RequestPlan(rng.randint(0, 10) * TICK_S, texts, bulk=rng.random() < 0.3, streams=rng.random() < 0.3)
        plan.tenant = some([None, None, "a", "b"])
        plan.source = some(["list", "list", "plain", "awaited"])
        if hostile and plan.source != "list" and rng.random() < 0.4:
            plan.source_fault = some(["raises", "strays", "panics", "exits"])
        if rng.random() < 0.2:
            plan.timeout_s = rng.randint(1, 60) * TICK_S
        if rng.random() < 0.2:
            plan.leaves_at = plan.arrives_at + rng.randint(0, 40) * TICK_S
        world.requests.append(plan)
    if any(stage.kind == "best" for stage in world.stages):
        for plan in world.requests:  # which ones are the best does not matter then
            plan.items = [text for text in plan.items if text in ("a", "bc", "ccc")] or ["a"]
    if rng.random() < 0.15:
        world.drains_at, world.drain_s = rng.randint(0, 30) * TICK_S, some([0.0, 0.01, 10.0])
    return world
