"""A world of a fleet, as a JSON value, and the world of a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["kill", "freeze", "cut"]
"""`cut`: the lines of a front to the engine process end, and both go on."""

SILENT_S = 4.0
DRAIN_S = 1.0


@dataclass(slots=True)
class EventPlan:
    """Something that happens to one process, or to all."""

    at: float = 0.0
    kind: Kind = "kill"
    who: str = "front-1"
    """A name, `supervisor` (it is only ever frozen), or `all` (also the supervisor)."""
    for_s: float = 0.0
    """Length of a freeze."""


@dataclass(slots=True, kw_only=True)
class FleetWorld:
    seed: int = 0
    fronts: int = 2
    events: list[EventPlan] = field(default_factory=list)
    fork_s: float = 0.0
    """Seconds until the system has started a process."""
    import_s: float = 0.2
    """Seconds until a process reads its orders."""
    load_s: float = 0.5
    """Seconds in which the engine process loads its models."""
    open_s: float = 0.1
    """Seconds in which a front opens its engines, once the engine process has welcomed it."""
    request_s: float = 0.05
    every_s: float = 0.1
    """Seconds between two connections of clients."""
    failing_starts: list[int] = field(default_factory=list)
    """Starts, counted from 0 over all children, for which the system has no room."""
    failing_lines: list[int] = field(default_factory=list)
    """Numbers of lines for which the system has no room: for even ones, once the front has its end."""
    missed_lines: dict[str, list[int]] = field(default_factory=dict)
    """Numbers of the lines for whose end a process has no room, by its name."""
    wrong_start: int | None = None
    """A start whose process ends with the exit code of wrong settings."""
    ends_at: float = math.inf
    """Time of SIGTERM. Infinity: it comes once all is at rest."""
    again_after_s: float = math.inf
    """Seconds from there to a second SIGTERM."""
    pieces: int = 1 << 16
    wire_ticks: int = 0


def from_json(given: Mapping[str, Any]) -> FleetWorld:
    """Read a world.

    Raises:
        ValueError: It is none: nothing can run in it.
    """
    plain = dict(given)
    world = FleetWorld(events=[EventPlan(**event) for event in plain.pop("events", [])], **plain)
    if world.fronts < 1 or world.pieces < 1 or world.every_s <= 0.0:
        raise ValueError("a world has fronts, pieces of bytes, and time between two connections")
    return world


def draw(seed: int) -> FleetWorld:
    """Return the world of a seed, always the same one."""
    rng = random.Random(f"{seed} fleet")
    some = rng.choice
    world = FleetWorld(
        seed=seed,
        fronts=some([1, 2, 2, 3]),
        fork_s=some([0.0, 0.01, 0.5]),
        import_s=some([0.05, 0.5, 1.5]),
        load_s=some([0.1, 2.0, 8.0]),
        open_s=some([0.0, 0.1, 1.0]),
        request_s=some([0.0, 0.05, 0.4]),
        every_s=some([0.03, 0.2]),
        pieces=some([7, 1 << 16]),
        wire_ticks=some([0, 2]),
    )
    names = ["engine", *(f"front-{number + 1}" for number in range(world.fronts))]
    at = 0.0
    for _ in range(rng.randint(0, 8)):
        at += some([0.0, 0.02, 0.3, 1.0, 3.0]) * rng.random()
        kind: Kind = some(["kill", "kill", "kill", "freeze", "cut"])
        who = some(names if kind == "kill" else [*names, "supervisor", "all"] if kind == "freeze" else names[1:])
        world.events.append(
            EventPlan(
                round(at, 3),
                kind,
                who,
                some([0.3, 3.0, 12.0, 1000.0 if who in names else 30.0]) if kind == "freeze" else 0.0,
            )
        )
    if rng.random() < 0.2:
        world.failing_starts = sorted(rng.sample(range(8), rng.randint(1, 3)))
    if rng.random() < 0.05:
        world.wrong_start = rng.randrange(6)
    if rng.random() < 0.5:
        world.ends_at = round(rng.random() * some([0.3, 3.0, 12.0]), 3)
        if rng.random() < 0.3:
            world.again_after_s = round(rng.random() * some([0.1, 2.0]), 3)
    if rng.random() < 0.2:
        world.failing_lines = sorted(rng.sample(range(1, 9), rng.randint(1, 3)))
    if rng.random() < 0.3:
        for name in rng.sample(names, rng.randint(1, len(names))):
            world.missed_lines[name] = sorted(rng.sample(range(1, 13), rng.randint(1, 6)))
    if world.ends_at < math.inf and rng.random() < 0.4:
        in_drain = round(world.ends_at + some([0.1, 0.5]) * rng.random(), 3)
        world.events.append(EventPlan(in_drain, "kill", some(names)))
    return world
