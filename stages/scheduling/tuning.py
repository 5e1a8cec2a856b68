"""Tuning constants of scheduling, each with its unit, origin and measuring command."""

from __future__ import annotations

from typing import Final

INTERACTIVE_WEIGHT: Final = 7
"""Tokens of interactive work for each token of bulk work, while both wait.

So bulk work gets an eighth of the device. A choice, not a measurement: `tests/sim` checks that neither starves.
"""

QUEUE_IN_BATCHES: Final = 8
"""Least number of batches that a queue is cut into.

So the running forward is a small part of the wait of the next request. `python -m perf overload` measures it.
"""

BUDGET_STEPS: Final = 32
"""Steps of a token budget from 0 to its largest value. A full batch adds one step."""

BUDGET_DECREASE: Final = 0.8
"""Factor of a token budget after a forward that took longer than its target.

Chiu and Jain (1989) show that additive increase and multiplicative decrease converge for any factor below 1.
"""

SERVICE_TIME_BATCHES: Final = 30.0
"""Memory of the mean service time, in batches: a batch this many batches ago weighs 1/e."""

SERVICE_SHAPE_BATCHES: Final = 900.0
"""Memory of the fit of service time to batch size, in batches.

It is long because the fixed part hardly changes, and only batches of many sizes show it.
"""

LEAST_VARIATION: Final = 0.1
"""Least coefficient of variation of batch sizes for a fit. Below it, a slope would be noise."""

IMAGE_WAITING_BATCHES: Final = 4
"""Most full batches of images between feeding and the end of their forward.

An image takes kilobytes for each token. `python -m perf memory` measures it.
"""

ANSWERING_S: Final = 0.002
"""Seconds of writing small answers before other tasks of the event loop run.

An iteration of the loop costs as much as one or two answers, and a batch may complete a hundred requests.
`python -m perf liveness` measures it.
"""

CORE_TIMEOUT_S: Final = 1.0
"""Longest wait for a core, in seconds. A call that hangs keeps its core, and other work must go on.

A choice: longer than most images take in preprocess.
"""

CORE_TURN_S: Final = 0.01
"""Shortest turn of a long call at a core that another waits for, in seconds.

A choice: about the time of an image in preprocess.
"""

LATE_SHARE: Final = 0.01
"""Part of the answers that may be later than the target delay. A choice: their p99 is within it."""

TIMES_FREE: Final = 7
"""Share of a limit for one tenant, or for all bulk work: a multiple of the free rest.

This is a dynamic threshold (Choudhury and Hahne, 1998). A tenant that is alone gets at most seven eighths.
"""

LEARNING_WEIGHT: Final = 0.05
"""Weight of the newest observation in a running mean: about the last 20 count."""

RARE: Final = 0.1
"""Least part of bodies of one size that use a lane, to expect it."""
