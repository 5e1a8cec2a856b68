"""The live feed: one snapshot of the server for all its clients, a few times a second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import anyio
import msgspec

from staged_pool.api.live.verdict import Verdict, judge
from staged_pool.api.live.view import ModelView, Moment, ReaderView, view_model, view_readers

PERIOD_S: Final = 0.25
"""Seconds between two events."""

WINDOW_S: Final = 2.0
"""Seconds over which rates are taken: eight events, long enough to be steady and short enough to be live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """One model, as an event tells of it."""

    view: ModelView
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveEvent:
    """One event: the whole server at one moment. No event depends on an earlier one."""

    at: float
    """Seconds since the epoch."""
    period_s: float
    """Seconds until the next event."""
    state: str
    """Reason why requests are not accepted; empty while they are."""
    models: Mapping[str, LiveModel]
    """Empty until the models are loaded."""
    readers: ReaderView | None


@dataclass(slots=True)
class LiveFeed:
    """Makes one event for each period, for all clients, and none without a client.

    Args:
        take: Takes the statistics of the server.
        state: Returns the reason why requests are not accepted; empty while they are.
        clock: Returns the seconds since the epoch.
    """

    take: Callable[[], Awaitable[Moment]]
    state: Callable[[], str]
    clock: Callable[[], float] = time.time
    _lock: anyio.Lock = field(default_factory=anyio.Lock)
    _moments: deque[Moment] = field(default_factory=deque)
    """Moments of the last `WINDOW_S` seconds, oldest first."""
    _told: dict[str, Verdict] = field(default_factory=dict)
    """The verdict of the last event, by model."""
    _event: bytes = b""
    _period: int = -1
    """Number of the period that `_event` was made in."""

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the JSON of each event. A client that is slow misses events, and gets the newest one next."""
        told = -1
        while True:
            period = int(self.clock() / PERIOD_S)
            if period != told:  # a timer may end a little early, in the period of the last event
                async with self._lock:
                    if self._period < period:
                        self._event = msgspec.json.encode(self._look(await self.take()))
                        self._period = period
                    event = self._event
                yield event
                told = period
            await anyio.sleep(max(0.0, (period + 1) * PERIOD_S - self.clock()))

    def _look(self, now: Moment) -> LiveEvent:
        moments = self._moments
        if moments and now.at - moments[-1].at > WINDOW_S:  # nobody has looked for long
            moments.clear()
            self._told.clear()
        moments.append(now)
        while len(moments) > 2 and now.at - moments[1].at >= WINDOW_S:
            moments.popleft()
        before = moments[0]
        readers = view_readers(now, before)
        models = {}
        for name in now.engines:
            view = view_model(now, before, name)
            verdict = self._told[name] = judge(view, readers, self._told.get(name))
            models[name] = LiveModel(view=view, verdict=verdict)
        return LiveEvent(at=now.at, period_s=PERIOD_S, state=self.state(), models=models, readers=readers)
