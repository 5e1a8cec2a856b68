"""Recovery of throughput after trouble.

A world of two phases asks for the same before and after trouble (`ClientPlan.phase`). After it, the same may take a
tenth longer, and two forwards, for the first and the last one are not always full. Between them are the trouble and
some work by which the engine finds out that it is over.
"""

from __future__ import annotations

from tests.sim.internals import EPSILON
from tests.sim.liveness import forward_s
from tests.sim.outcomes import RESULTS
from tests.sim.watch import Watch
from tests.sim.world import Phase

MOST = 1.1
"""Maximum time of the same work after trouble, as a multiple of the time before."""


def check(watch: Watch) -> None:
    """Check that the second phase took hardly longer than the first one."""
    before_s, after_s = _took_s(watch, "before"), _took_s(watch, "after")
    one_s = forward_s(watch.world, watch.world.config.batch_tokens("cpu"))
    if before_s is not None and after_s is not None and after_s > MOST * before_s + 2 * one_s + EPSILON:
        watch.fail(f"the same work took {before_s:.3g} s before the trouble and {after_s:.3g} s after it")


def _took_s(watch: Watch, phase: Phase) -> float | None:
    """Seconds from the first arrival of a phase to its last answer; None where it has none."""
    clients = [client for client in watch.world.clients if client.phase == phase]
    for client in clients:
        if not isinstance(watch.outcomes.get(client.number), RESULTS):
            watch.fail(f"client {client.number} has no answer {phase} the trouble")
            return None
    if not clients:
        return None
    return max(watch.settled_at[one.number] for one in clients) - min(one.arrives_at for one in clients)
