"""Sweeps of the offered load: rates that are given, or found by doubling and halving around the knee."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from staged_pool.stages.errors import ConfigError

GOOD_SHARE: Final = 0.9
"""Share of the offered load below which goodput counts as fallen."""

MOST_LEVELS: Final = 24
"""Most levels of a sweep that finds its rates."""

REFINEMENTS: Final = 3
"""Levels between the last rate that held and the first that did not."""

CLOSE: Final = 1.08
"""Ratio of these two rates below which there are no further levels."""

LEAST_RATE: Final = 0.05


class Tried(NamedTuple):
    """A level that has been measured."""

    rate: float
    held: bool
    """The server kept up with it."""


class Sweep(Protocol):
    """Chooses the rates of a sweep."""

    def next_rate(self, tried: Sequence[Tried]) -> float | None:
        """Return the rate of the next level; None at the end."""


class GivenRates:
    """A sweep over rates that the user gives."""

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates = rates

    def next_rate(self, tried: Sequence[Tried]) -> float | None:
        """See `Sweep`."""
        return self._rates[len(tried)] if len(tried) < len(self._rates) else None


class FoundRates:
    """A sweep that doubles its rate up to the knee, and then looks closer.

    Args:
        first: First rate. If the server does not keep up with it, the rate is halved until it does.
    """

    def __init__(self, first: float) -> None:
        self._first = first
        self._refined = 0

    def next_rate(self, tried: Sequence[Tried]) -> float | None:
        """See `Sweep`."""
        if not tried:
            return _tidy(self._first)
        if len(tried) >= MOST_LEVELS:
            return None
        over = min((each.rate for each in tried if not each.held), default=math.inf)
        held = max((each.rate for each in tried if each.held and each.rate < over), default=0.0)
        if math.isinf(over):
            return _tidy(held * 2)
        if not held:
            return _tidy(over / 2) if over / 2 >= LEAST_RATE else None
        if self._refined >= REFINEMENTS or over / held < CLOSE:
            return None
        self._refined += 1
        return _tidy(math.sqrt(held * over))


def read_rates(text: str) -> Sequence[float] | None:
    """Read `50,100,200`; None for `auto`.

    Raises:
        ConfigError: It is neither.
    """
    if text == "auto":
        return None
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate <= 1e6 for rate in rates):
        raise ConfigError(f"sweep={text!r}: must be auto, or rates above 0 in requests a second, such as 50,100,200")
    return sorted(rates)


def held(level: Mapping[str, Any], *, slo: bool) -> bool:
    """Return true if the server kept up with a level: goodput is near the offered load, and nothing is rejected.

    Args:
        level: Report of the level.
        slo: Answers have a time limit; those within it are counted, by when requests were due. Without one, the rate
            of answers is.
    """
    counts = level["requests"]
    if counts["rejected"] or not counts["due"]:
        return False
    if slo:
        return bool(counts["answered"] - counts["late"] >= GOOD_SHARE * counts["due"])
    answered = level["rates"]["answered"]
    return answered is not None and bool(answered["value"] >= GOOD_SHARE * level["offered_rate"])


def knee(tried: Sequence[Tried]) -> dict[str, Any] | None:
    """Return the highest rate that held, and the lowest that did not; None if there is no such pair."""
    over = min((each.rate for each in tried if not each.held), default=None)
    if over is None:
        return None
    return {"held": max((each.rate for each in tried if each.held and each.rate < over), default=None), "over": over}


def _tidy(rate: float) -> float:
    return float(f"{rate:.3g}")
