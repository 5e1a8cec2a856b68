"""World of a pool of processes as JSON, and the world of a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TICK_S = 0.001

JobKind = Literal["done", "failed", "fatal"]
"""A job succeeds, raises an error, or ends its process."""


@dataclass(slots=True)
class JobPlan:
    arrives_at: float = 0.0
    kind: JobKind = "done"
    ticks: int = 1
    """Length of the job, from its acknowledgement."""
    cancelled_at: float = math.inf


@dataclass(slots=True)
class KillPlan:
    """A process is killed from outside."""

    at: float = 0.0
    which: int = 0
    """Its number among those that run then, modulo their number."""
    late_ticks: int = 0
    """Time between the ends of its main thread and of its pipe."""
    code_ticks: int = 0
    """Time from then on until it has an exit code."""


@dataclass(slots=True, kw_only=True)
class WorkersWorld:
    seed: int = 0
    processes: int = 1
    lazily: bool = False
    load_ticks: int = 1
    read_ticks: int = 0
    """Time between the hand-over of a job and its acknowledgement."""
    jobs: list[JobPlan] = field(default_factory=list)
    kills: list[KillPlan] = field(default_factory=list)
    scarce: list[float] = field(default_factory=list)
    """Times, in pairs, between which no process can be started."""
    unopenable: list[float] = field(default_factory=list)
    """Times, in pairs, between which no process can open its work."""
    closes_at: float = math.inf


def from_json(given: Mapping[str, Any]) -> WorkersWorld:
    """Read a world."""
    plain = dict(given)
    jobs = [JobPlan(**job) for job in plain.pop("jobs", [])]
    kills = [KillPlan(**kill) for kill in plain.pop("kills", [])]
    return WorkersWorld(jobs=jobs, kills=kills, **plain)


def draw(seed: int) -> WorkersWorld:
    """Return the world of a seed, always the same one."""
    rng = random.Random(f"{seed} workers")
    some = rng.choice
    world = WorkersWorld(
        seed=seed,
        processes=some([1, 1, 2, 3]),
        lazily=rng.random() < 0.5,
        load_ticks=some([0, 1, 10]),
        read_ticks=some([0, 1, 3]),
    )
    kinds: list[JobKind] = ["done", "done", "done", "done", "failed", "fatal"]
    for _ in range(rng.randint(1, 10)):
        job = JobPlan(rng.randint(0, 30) * TICK_S, some(kinds), some([0, 1, 5]))
        if rng.random() < 0.25:
            job.cancelled_at = job.arrives_at + rng.randint(0, 15) * TICK_S
        world.jobs.append(job)
    if rng.random() < 0.7:
        for _ in range(rng.randint(1, 5)):
            world.kills.append(
                KillPlan(rng.randint(0, 30) * TICK_S, rng.randint(0, 2), some([0, 0, 1, 8]), some([0, 1, 4]))
            )
    for times in (world.scarce, world.unopenable):
        if rng.random() < 0.1:
            begin = rng.randint(1, 20) * TICK_S
            times += [begin, begin + rng.randint(1, 20) * TICK_S]
    if rng.random() < 0.2:
        world.closes_at = rng.randint(0, 40) * TICK_S
    return world
