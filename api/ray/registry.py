"""Registry of a preparer: each model has an engine for each line, and the best one takes the next request."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.app.load_report import ServerLoad
from staged_pool.api.fleet.snapshot import total
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.spread_engine import SpreadEngine
from staged_pool.runtime.remote.line import FrontLine
from staged_pool.runtime.statistics import EngineLoad, EngineStatistics, LaneLoad


class LineRegistry(EngineRegistry):
    """Engines of all lines of one preparer.

    A request goes to the line with the fewest requests of this preparer. Among equals, it goes to the engine replica
    that predicts the shortest drain time. Replicas whose device is stalled come last, and those that leave get none.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[Engine, FrontLine] = {}
        self._peers: dict[str, list[Engine]] = {}
        """Engines of each model. An ended one stays while there is no other: requests need its name and its fault."""
        self._ended: set[Engine] = set()

    @property
    def has_line(self) -> bool:
        """True if a line is open."""
        return len(self._lines) > len(self._ended)

    def join(self, engines: Collection[Engine], line: FrontLine) -> None:
        """Send requests to the engines of a line from now on, too."""
        for engine in engines:
            cast(SpreadEngine, engine).elsewhere = partial(self._elsewhere, engine.card.name)
            self._lines[engine] = line
            self._peers.setdefault(engine.card.name, []).append(engine)
        self._forget_ended()
        self.open(*(peers[0] for peers in self._peers.values()))

    def part(self, engines: Iterable[Engine]) -> None:
        """Send no request to the engines of a line that has ended."""
        self._ended.update(engines)
        self._forget_ended()
        self._set({name: peers[0] for name, peers in self._peers.items()})

    def statistics(self) -> Mapping[str, EngineStatistics]:
        """Return the statistics of each model, over all lines."""
        return {name: _joint([engine.statistics() for engine in peers]) for name, peers in self._peers.items()}

    def load(self) -> ServerLoad:
        """Return the load of all engine replicas that this preparer knows."""
        return ServerLoad.of(
            {name: _joint_load([engine.load() for engine in peers]) for name, peers in self._peers.items()}
        )

    def _choose(self, engine: Engine) -> Engine:
        peers = self._peers[engine.card.name]
        return min(peers, key=self._rank) if len(peers) > 1 else engine

    def _comes_back(self, engine: Engine) -> bool:
        """Tell that no engine does: a new replica comes with an engine of its own."""
        return False

    def _elsewhere(self, name: str, tried: Sequence[Engine]) -> Engine | None:
        others = [engine for engine in self._peers[name] if engine not in tried and not self._avoids(engine)]
        return min(others, key=self._rank, default=None)

    def _avoids(self, engine: Engine) -> bool:
        return engine.fault is not None or self._lines[engine].is_leaving

    def _rank(self, engine: Engine) -> tuple[bool, bool, int, float, float]:
        drain_s = max((lane.drain_s for lane in engine.load().lanes.values()), default=0.0)
        return (
            self._avoids(engine),
            engine.stall is not None,
            self._lines[engine].requests,
            drain_s,
            random.random(),
        )

    def _forget_ended(self) -> None:
        """Drop the engines of ended lines, but the last one of a model."""
        for peers in self._peers.values():
            for engine in [each for each in peers if each in self._ended]:
                if len(peers) > 1:
                    peers.remove(engine)
                    self._ended.remove(engine)
                    del self._lines[engine]
                    self.totals.replaced(engine)
                    self.totals.ended(engine)


def _joint(parts: Sequence[EngineStatistics]) -> EngineStatistics:
    """Add up statistics, but no limits: the account of a front has none that could be reached."""
    found, one = total(parts), parts[0].admission
    limits: dict[str, Any] = {
        "max_requests": one.max_requests,
        "max_items": one.max_items,
        "max_tokens": one.max_tokens,
        "max_bytes": one.max_bytes,
    }
    return replace(found, admission=replace(found.admission, **limits))


def _joint_load(loads: Sequence[EngineLoad]) -> EngineLoad:
    """Return the load of several replicas of one model: a request may go to the one with the most room."""
    lanes = {
        lane: LaneLoad(
            drain_s=min(load.lanes[lane].drain_s for load in loads if lane in load.lanes),
            utilization=sum(load.lanes[lane].utilization for load in loads if lane in load.lanes) / len(loads),
        )
        for lane in loads[0].lanes
    }
    return EngineLoad(
        requests=sum(load.requests for load in loads),
        running=sum(load.running for load in loads),
        requests_per_second=sum(load.requests_per_second for load in loads),
        fullness=min(load.fullness for load in loads),
        lanes=lanes,
    )
