"""A world of batches, as a JSON value, and the world of a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["http", "route of a plugin", "pipeline"]
"""A caller: rejected or answered at once, with a second answer beside the first, or one that waits for room."""

TICK_S = 0.001


@dataclass(slots=True)
class LinePlan:
    texts: int = 1
    letters: int = 50
    """Letters of each text: it has a vector for each of them."""


@dataclass(slots=True)
class JobPlan:
    lines: list[LinePlan] = field(default_factory=lambda: [LinePlan()])
    arrives_at: float = 0.0
    stops_at: float = math.inf
    """No further line is begun."""
    cancelled_at: float = math.inf
    """Lines in work are dropped."""
    tenant: str | None = None
    window: int = 4
    writing_ticks: int = 0
    """Most ticks of a write of answers."""


@dataclass(slots=True)
class CallerPlan:
    kind: Kind = "http"
    asks: LinePlan = field(default_factory=LinePlan)
    arrives_at: float = 0.0
    leaves_at: float = math.inf
    reads_ticks: int = 0
    """Ticks for which the answer is being sent."""
    again: int = 0
    """Further requests, one after the other."""
    tenant: str | None = None


@dataclass(slots=True, kw_only=True)
class BatchWorld:
    seed: int = 0
    jobs: list[JobPlan] = field(default_factory=list)
    callers: list[CallerPlan] = field(default_factory=list)
    limit_letters: int = 300
    """Letters whose vectors fit into the memory of answers, once they are written."""
    engine_requests: int = 64
    device_ticks: int = 1
    batch_items: int = 64
    knows_width: bool = True
    """The card tells the width of token vectors: what an answer takes is known before it is computed."""


def from_json(given: Mapping[str, Any]) -> BatchWorld:
    """Read a world."""
    plain = dict(given)
    jobs, callers = plain.pop("jobs", []), plain.pop("callers", [])
    return BatchWorld(
        jobs=[JobPlan(**{**job, "lines": [LinePlan(**line) for line in job.get("lines", [{}])]}) for job in jobs],
        callers=[CallerPlan(**{**caller, "asks": LinePlan(**caller.get("asks", {}))}) for caller in callers],
        **plain,
    )


def draw(seed: int) -> BatchWorld:
    """Return the world of a seed, always the same one."""
    rng = random.Random(f"{seed} batches")
    some = rng.choice
    world = BatchWorld(
        seed=seed,
        limit_letters=some([100, 300, 1000]),
        engine_requests=some([4, 64, 64]),
        device_ticks=some([0, 1, 5]),
        batch_items=some([1, 4, 64]),
        knows_width=rng.random() < 0.6,
    )

    def line(share: float) -> LinePlan:
        """Draw a line that takes up to a share of the memory; a little, or nearly all of the share."""
        letters = max(2, int(world.limit_letters * share * some([0.05, 0.3, 0.6, 0.9])))
        texts = max(some([1, 3, 8]), -(-letters // 200))
        return LinePlan(texts, max(1, letters // texts))

    for _ in range(rng.randint(1, 3)):
        job = JobPlan(arrives_at=rng.randint(0, 10) * TICK_S, window=some([1, 4, 16]), writing_ticks=some([0, 2, 20]))
        job.lines = [line(1.5 if rng.random() < 0.1 else 1.0) for _ in range(some([1, 4, 10]))]
        job.tenant = some([None, "a", "b"])
        if rng.random() < 0.15:
            job.stops_at = job.arrives_at + rng.randint(0, 40) * TICK_S
        if rng.random() < 0.15:
            job.cancelled_at = job.arrives_at + rng.randint(0, 40) * TICK_S
        world.jobs.append(job)
    kinds: list[Kind] = ["http", "http", "route of a plugin", "pipeline"]
    for _ in range(rng.randint(0, 5)):
        caller = CallerPlan(some(kinds), line(0.5), rng.randint(0, 20) * TICK_S, again=some([0, 0, 5, 20]))
        caller.reads_ticks = some([0, 1, 10])
        caller.tenant = some([None, "a", "c"])
        if rng.random() < 0.2:
            caller.leaves_at = caller.arrives_at + rng.randint(0, 40) * TICK_S
        world.callers.append(caller)
    return world
