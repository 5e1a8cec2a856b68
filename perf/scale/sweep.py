"""Loads from light to overload, and the knee: the load above which p99 leaves its floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Final

from perf.scale.need import busy
from perf.scale.shard import Arriving, Outcome, Shard, simulate

LOADS: Final = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
"""Parts of the capacity."""

OF_FLOOR: Final = 2.0
"""The knee is where p99 is this many times that of the lightest load: a definition, as good as any."""

TEXTS: Final = 8_000
"""Texts of one load in a simulation."""


@dataclass(frozen=True, slots=True)
class Level:
    """One simulated load."""

    load: float
    """Part of the capacity."""
    outcome: Outcome

    @property
    def p50_ms(self) -> float:
        return 1e3 * self.outcome.percentile_s(0.5)

    @property
    def p99_ms(self) -> float:
        return 1e3 * self.outcome.percentile_s(0.99)


def capacity(shard: Shard) -> float:
    """Return the most requests a second of a shard: those at which its busiest resource never rests.

    Batches have the least token budget. Under load they grow, so a shard that is limited by its device may do more.
    """
    each = busy(shard.costs, shard.device, shard.traffic, chunk_texts=shard.chunk_items)
    fronts = max(1, shard.fronts)
    loops = (each.front_loop / fronts + each.front_batch, each.engine_loop)
    if not shard.fronts:
        work = shard.traffic.work(1.0, shard.device.batch_texts(shard.traffic.tokens))
        loops = (shard.costs.one_loop.of(work), 0.0)
    slots = shard.device.slots if shard.device.cores is None else 1
    return 1.0 / max(*loops, each.device / slots) / shard.traffic.texts


def sweep(shard: Shard, *, loads: Sequence[float] = LOADS, texts: int = TEXTS, seed: int = 0) -> list[Level]:
    """Simulate loads, each from an empty shard."""
    most, requests = capacity(shard), max(200, round(texts / shard.traffic.texts))
    return [Level(load, simulate(shard, Arriving(requests=requests, per_s=load * most, seed=seed))) for load in loads]


def knee(points: Sequence[tuple[float, float]], of_floor: float = OF_FLOOR) -> float:
    """Return the load at which p99 has left its floor; infinite if it has not.

    Args:
        points: Loads and their p99, the lightest load first. Between two of them a line is assumed.
        of_floor: See `OF_FLOOR`.
    """
    limit = of_floor * points[0][1]
    for (before, low), (load, high) in pairwise(points):
        if high > limit:
            return before + (load - before) * (limit - low) / (high - low)
    return inf
