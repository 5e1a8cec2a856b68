"""Arrival times of an open loop: drawn before the load, whatever the server does."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def arrival_times(
    rate: float, seconds: float, rng: np.random.Generator, burstiness: float = 1.0
) -> NDArray[np.float64]:
    """Draw the times of requests, in seconds from the start, in order.

    Their number is fixed, `rate` times `seconds`, so that levels of a sweep have exactly the ratio that they should
    have. The gaps between them are of a gamma distribution, and with `burstiness` 1 the times are those of a Poisson
    process, given their number.

    Args:
        rate: Requests a second.
        seconds: Length of the load.
        rng: Source of randomness.
        burstiness: Shape of the gaps. Below 1, requests come in bursts; far above 1, they come evenly.
    """
    count = round(rate * seconds)
    gaps = rng.gamma(burstiness, size=count + 1)
    total = float(gaps.sum())
    if not total > 0:  # gaps of an extreme burstiness underflow: everything comes at once
        return np.zeros(count)
    times: NDArray[np.float64] = np.minimum(np.cumsum(gaps)[:-1] * (seconds / total), seconds)
    return times
