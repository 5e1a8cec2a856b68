"""Items between two stages: their values, their parts, and the best of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappush, heappushpop
from typing import TYPE_CHECKING, cast

from staged_pool.runtime.pipelines.declaration import PipelineStage
from staged_pool.runtime.pipelines.parts import Parts
from staged_pool.runtime.pipelines.steps import VANISHED

if TYPE_CHECKING:
    from staged_pool.runtime.pipelines.build import BuiltStage


@dataclass(frozen=True, slots=True)
class Moving:
    """An item between two stages."""

    index: int
    """Index among the items of the request."""
    parts: tuple[int, ...]
    """Its number among the items that each expanding stage made of one, by stage."""
    order: tuple[int, ...]
    """Place in the order of the answer."""
    values: Mapping[str, object]
    """Values by name: the request, the item as given, and those of the stages so far."""

    def with_value(self, stage: str, value: object) -> Moving:
        """Return the item behind a stage."""
        return replace(self, values={**self.values, stage: value})

    def part(self, number: int, stage: str, value: object) -> Moving:
        """Return one of the items that a stage made of this one."""
        return replace(
            self,
            parts=(*self.parts, number),
            order=(*self.order, number),
            values={**self.values, stage: value},
        )


def behind(stage: PipelineStage, item: Moving, value: object) -> Sequence[Moving]:
    """Return what a stage makes of an item: nothing, one item, or several, if its value has the parts of one."""
    if value is VANISHED:
        return ()
    if not stage.expand:
        return (item.with_value(stage.name, value),)
    return [item.part(number, stage.name, part) for number, part in enumerate(cast(Parts, value))]


class Ranking:
    """The best items of a request, by the scores of a stage. It holds `top_k` of them at most."""

    def __init__(self, stage: str, top_k: int) -> None:
        self._stage = stage
        self._top_k = top_k
        self._heap: list[tuple[float, tuple[int, ...], Moving]] = []
        """The least first. Of equal scores, the later item is the lesser one."""

    def add(self, item: Moving) -> None:
        """Add an item. If there are too many, the least one vanishes."""
        score = item.values[self._stage]
        assert isinstance(score, float), "only stages that score have a `top_k`"
        entry = (score, tuple(-place for place in item.order), item)
        if len(self._heap) < self._top_k:
            heappush(self._heap, entry)
        else:
            heappushpop(self._heap, entry)

    def best(self) -> Sequence[Moving]:
        """Return the items in their new order, the best first."""
        best = sorted(self._heap, key=lambda entry: entry[:2], reverse=True)
        return [replace(item, order=(place,)) for place, (_, _, item) in enumerate(best)]


def ranking_of(segment: Sequence[BuiltStage]) -> Ranking | None:
    """Return the ranking at the end of a segment; None if its items go on as they come."""
    top_k = segment[-1].declared.top_k if segment else None
    return None if top_k is None else Ranking(segment[-1].name, top_k)
