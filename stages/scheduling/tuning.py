"""The numbers that scheduling is tuned by: each with its unit, where it comes from, and what measures it again."""

from __future__ import annotations

from typing import Final

INTERACTIVE_WEIGHT: Final = 7
"""Tokens that interactive work gets for each of bulk work, while both wait: bulk work is left an eighth of the device.
A choice, not a measurement: `tests/sim` checks that neither starves."""

QUEUE_IN_BATCHES: Final = 8
"""Batches that a queue is cut into at least, so that the forward which a newcomer finds running is a small part of its
wait. `python -m perf overload` measures it."""

BUDGET_STEPS: Final = 32
"""Steps in which a token budget grows from nothing to its most, one for each full batch."""

BUDGET_DECREASE: Final = 0.8
"""Factor of a token budget after a forward that took longer than its target. Chiu and Jain (1989) show that additive
increase and multiplicative decrease converge for any factor below 1."""

SERVICE_TIME_BATCHES: Final = 30.0
"""Batches after which a measured service time counts 1/e in the mean."""

SERVICE_SHAPE_BATCHES: Final = 900.0
"""The same for the part of a service time that does not depend on the batch's size: it hardly ever changes, and takes
batches of many sizes to see."""

LEAST_VARIATION: Final = 0.1
"""Coefficient of variation of batch sizes below which they are taken to be of one size: a slope would be noise."""

IMAGE_WAITING_BATCHES: Final = 4
"""Full batches of images that are between feeding and the end of their forward at most. An image takes kilobytes for
each token. `python -m perf memory` measures it."""

ANSWERING_S: Final = 0.002
"""Seconds for which answers are written before every other task has its turn. Each turn costs as much as an answer or
two; a batch may complete a hundred requests. `python -m perf liveness` measures it."""

CORE_PATIENCE_S: Final = 1.0
"""Seconds that work waits for a core that a call holds. A call that hangs keeps its core, and the others must get on.
A choice: longer than most images take that are prepared."""

DELAY_MARGIN: Final = 0.65
"""Part of the target delay within which a request is admitted: predictions are right on average only.
`python -m perf overload` measures it."""

TIMES_FREE: Final = 7
"""Times what it leaves free of a limit that one tenant, or all bulk work, may have: a dynamic threshold (Choudhury and
Hahne, 1998). One that is alone has seven eighths at most."""

LEARNING_WEIGHT: Final = 0.05
"""Weight of the newest observation in a running mean: about the last twenty count."""

RARE: Final = 0.1
"""Part of the bodies of a size below which a lane is not what the next one is expected to use."""
