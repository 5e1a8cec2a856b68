"""Ticket checks: skip work that was cancelled or that cannot meet its deadline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from staged_pool.stages.errors import Abandoned, DeadlineExceeded, ScopeEnds
from staged_pool.stages.meter import Drop, StageMeter
from staged_pool.stages.ticket import Item, Ticket

P = TypeVar("P")


def should_process(ticket: Ticket, meter: StageMeter, *, now: float, needs_s: float = 0.0) -> bool:
    """Return True if a ticket is open and `needs_s` seconds are left for it.

    A ticket that cannot be in time is settled here, so that its caller knows at once and no work is wasted.
    """
    if ticket.settled:
        meter.dropped[cause(ticket)] += 1
        return False
    if now + needs_s > ticket.latest:
        ticket.expire(meter.name)
        meter.dropped["expired"] += 1
        return False
    return True


def cause(ticket: Ticket) -> Drop:
    """Return the reason for dropping the items of a settled ticket."""
    match ticket.error:
        case Abandoned():
            return "abandoned"
        case DeadlineExceeded() | ScopeEnds():
            return "expired"
        case _:
            return "failed"


def drop_settled(
    items: Sequence[Item[P]], meter: StageMeter, *, now: float, needs_s: Callable[[Ticket], float] | None = None
) -> list[Item[P]]:
    """Return the items to work on, in order, and count their waits. See `should_process`."""
    kept: list[Item[P]] = []
    for item in items:
        ticket = item.ticket
        if not (kept and kept[-1].ticket is ticket):  # one check for adjacent items of a request
            takes_s = needs_s(ticket) if needs_s is not None and ticket.latest < math.inf else 0.0
            if not should_process(ticket, meter, now=now, needs_s=takes_s):
                continue
        meter.wait.observe(now - item.sent_at)
        kept.append(item)
    return kept
