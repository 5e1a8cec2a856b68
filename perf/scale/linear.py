"""Amounts of work, costs that are linear in them, and their fit to measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Final, Literal

import numpy as np

Feature = Literal["requests", "texts", "tokens", "batches"]


@dataclass(frozen=True, slots=True)
class Work:
    """An amount of work."""

    requests: float = 0.0
    texts: float = 0.0
    tokens: float = 0.0
    """Tokens of all texts."""
    batches: float = 0.0
    """Batches of the device; for preprocess: calls."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A cost, in seconds or bytes, for each unit of work."""

    requests: float = 0.0
    texts: float = 0.0
    tokens: float = 0.0
    batches: float = 0.0

    def of(self, work: Work) -> float:
        """Return the cost of an amount of work."""
        return (
            self.requests * work.requests
            + self.texts * work.texts
            + self.tokens * work.tokens
            + self.batches * work.batches
        )

    def times(self, factor: float) -> Linear:
        """Return the cost times a factor."""
        return Linear(*(factor * getattr(self, field.name) for field in fields(self)))


NOTHING: Final = Linear()


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted cost."""

    cost: Linear
    worst: float
    """Largest difference between the fit and a measurement, as a part of the measurement."""


def fit(measured: Sequence[tuple[Work, float]], features: Sequence[Feature]) -> Fit:
    """Fit a cost without negative parts to measurements, by least squares of the relative errors.

    Each subset of the features is fitted. The best fit without a negative coefficient wins: with three features this
    is the whole search of non-negative least squares.

    Args:
        measured: Work and its cost, above 0.
        features: Kinds of work that the cost may depend on.
    """
    costs = np.array([cost for _, cost in measured])
    columns = {name: np.array([getattr(work, name) for work, _ in measured]) / costs for name in features}
    best, best_error = NOTHING, float(len(measured))  # the errors of no cost at all
    for count in range(1, len(features) + 1):
        for names in combinations(features, count):
            matrix = np.stack([columns[name] for name in names], axis=1)
            values = np.linalg.lstsq(matrix, np.ones(len(costs)), rcond=None)[0]
            error = float(np.sum((matrix @ values - 1.0) ** 2))
            if values.min() >= 0.0 and error < best_error - 1e-12:
                best = Linear(**{name: float(value) for name, value in zip(names, values, strict=True)})
                best_error = error
    worst = max(abs(best.of(work) / cost - 1.0) for work, cost in measured)
    return Fit(best, worst)
