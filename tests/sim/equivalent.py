"""Mutants that change nothing that a caller could notice, each with the reason."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {
    "supervise.Supervisor.run: `log.exception('stage.worker_crashed', st` after `await anyio.sleep(self._next_delay_s())`":  # noqa: E501
        "the crash is in the log after the pause and not before it",
    "supervise.Supervisor.run: `log.error('memory.exhausted', stage=self` after `await anyio.sleep(self._policy.first_del`":  # noqa: E501
        "the want of memory is in the log after the pause and not before it",
    "supervise.Supervisor._next_delay_s: `self._meter.crashes += 1` after `now = anyio.current_time()`":
        "nothing reads the count between the two",
    "supervise.Supervisor._next_delay_s: < becomes <=":
        "only a crash exactly a window ago, to the last bit of the clock, would count for longer",
    "supervise.suppress_crash: `meter.crashes += 1` after `log.exception('stage.worker_crashed', st`":
        "the crash is in the log before it is counted and not after it",
}  # fmt: skip

NO_MUTANTS: dict[str, str] = {}
"""Mutants that always raise: the swapped parts depend on each other."""
