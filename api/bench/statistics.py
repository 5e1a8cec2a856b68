"""Statistics of latencies: quantiles, medians over rounds, and a bootstrap of the p99."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LEAST_SAMPLES: Final = 1000
"""Samples below which no p99 is given: fewer than ten of them would be beyond it."""

RESAMPLES: Final = 500
"""Samples that the bootstrap draws."""

BLOCK_S: Final = 1.0
"""Seconds of a block of the bootstrap.

Latencies of neighbours depend on each other, because they wait in the same queue. So whole blocks are drawn, not single
requests, which would give too narrow an interval.
"""


@dataclass(frozen=True, slots=True)
class Spread:
    """A value with a range around it."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return the median of rounds, the least and the largest; None if there are none."""
        known = [value for value in values if not np.isnan(value)]
        return cls(float(np.median(known)), min(known), max(known)) if known else None

    def report(self) -> dict[str, float]:
        """Return it as JSON has it."""
        return {"value": rounded(self.value), "low": rounded(self.low), "high": rounded(self.high)}


def quantile(values: NDArray[np.float64], share: float) -> float:
    """Return a quantile as numpy interpolates it; NaN of no values."""
    return float(np.quantile(values, share)) if len(values) else float("nan")


def bootstrap_quantile(
    values: NDArray[np.float64], times: NDArray[np.float64], share: float, rng: np.random.Generator
) -> Spread:
    """Return a quantile and its 95 % interval, from a bootstrap of blocks of `BLOCK_S`.

    Args:
        values: At least one.
        times: Seconds at which each was taken; they decide its block.
        share: Such as 0.99.
        rng: Source of randomness.
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    blocks = np.unique(np.floor(times / BLOCK_S), return_inverse=True)[1][order]
    count = int(blocks.max()) + 1
    found = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        weights = np.bincount(rng.integers(count, size=count), minlength=count)[blocks]
        found[number] = weighted_quantile(ordered, weights, share)
    low, high = np.quantile(found, (0.025, 0.975))
    value = quantile(values, share)
    return Spread(value, min(float(low), value), max(float(high), value))


def weighted_quantile(ordered: NDArray[np.float64], weights: NDArray[np.int64], share: float) -> float:
    """Return the quantile of values that are repeated `weights` times each, as numpy interpolates it.

    Args:
        ordered: Values in ascending order.
        weights: Whole numbers, whose sum is above zero.
        share: Such as 0.99.
    """
    ends = np.cumsum(weights)
    place = share * (int(ends[-1]) - 1)
    lower = int(place)
    below, above = np.searchsorted(ends, (lower, min(lower + 1, int(ends[-1]) - 1)), side="right")
    return float(ordered[below] + (ordered[above] - ordered[below]) * (place - lower))


def latency_report(
    seconds: NDArray[np.float64], times: NDArray[np.float64], rng: np.random.Generator
) -> dict[str, Any]:
    """Return the statistics of latencies in milliseconds, as JSON has them.

    Args:
        seconds: Latencies of answers.
        times: Seconds at which each request was due.
        rng: Source of randomness of the bootstrap.
    """
    ms = seconds * 1e3
    enough = len(ms) >= LEAST_SAMPLES
    return {
        "samples": len(ms),
        "mean": rounded(float(ms.mean())) if len(ms) else None,
        "p50": rounded(quantile(ms, 0.5)),
        "p90": rounded(quantile(ms, 0.9)),
        "p99": bootstrap_quantile(ms, times, 0.99, rng).report() if enough else None,
        "max": rounded(float(ms.max())) if len(ms) else None,
    }


def rounded(value: float) -> Any:
    """Round to four digits, and at least to whole numbers; None for NaN, which JSON has not."""
    if np.isnan(value):
        return None
    return float(f"{value:.4g}") if abs(value) < 1e4 else float(round(value))
