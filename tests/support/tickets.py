"""Plans, loads and waiting items for tests of stages without an engine."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from staged_pool.stages.scheduling.batch_former import BatchFormer
from staged_pool.stages.ticket import Item
from staged_pool.stages.work import Plan


def a_plan(inputs: int) -> Plan[object]:
    """Plan of a request with `inputs` inputs; its result is the list of its rows."""
    return Plan(range(inputs), lambda rows, tokens: list(rows))


class NoLoad:
    """For tickets that no admission has let in."""

    def may_feed(self, lane: Hashable, inputs: int) -> bool:
        return True

    def tokens_of(self, lane: Hashable, inputs: int) -> int:
        return inputs

    def fed(self, lane: Hashable, inputs: int) -> None:
        """Nobody counts."""

    def tokenized(self, lane: Hashable, tokens: int) -> None:
        """Nobody counts."""

    def computed(self, lane: Hashable, tokens: int) -> None:
        """Nobody counts."""

    def adjust_tokens(self, lane: Hashable, tokens: int) -> None:
        """Nobody counts."""

    def delivered(self, numbers: int, left: int) -> None:
        pass

    def cached(self, lane: Hashable, tokens: int) -> None:
        """Nobody counts."""


def wait_in(builder: BatchFormer[Any], items: Iterable[Item[Any]]) -> None:
    """Have items wait, of any requests."""
    for item in items:
        builder.queue.add(item)
