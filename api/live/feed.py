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

HOLD_S: Final = 1.0
"""Seconds for which a new verdict must hold before it is told: a sentence that flickers cannot be read."""


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
class SteadyVerdict:
    """Holds a verdict until another one has been right for `HOLD_S` seconds."""

    _told: Verdict | None = None
    _next: Verdict | None = None
    _since: float = 0.0

    def tell(self, verdict: Verdict, now: float) -> Verdict:
        """Return the verdict to tell, given the present one and the time in seconds.

        The numbers in the sentences are always those of now.
        """
        if self._told is None or _is_same(verdict, self._told) or verdict.kind == "off":
            self._told, self._next = verdict, None
        elif self._next is None or not _is_same(verdict, self._next):
            self._next, self._since = verdict, now
        elif now - self._since >= HOLD_S:
            self._told, self._next = verdict, None
        return self._told


def _is_same(one: Verdict, other: Verdict) -> bool:
    return (one.kind, one.at, one.lead) == (other.kind, other.at, other.lead)


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
    _verdicts: dict[str, SteadyVerdict] = field(default_factory=dict)
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
            self._verdicts.clear()
        moments.append(now)
        while len(moments) > 2 and now.at - moments[1].at >= WINDOW_S:
            moments.popleft()
        before = moments[0]
        readers = view_readers(now, before)
        models = {}
        for name in now.engines:
            view = view_model(now, before, name)
            steady = self._verdicts.setdefault(name, SteadyVerdict())
            models[name] = LiveModel(view=view, verdict=steady.tell(judge(view, readers), now.at))
        return LiveEvent(at=now.at, period_s=PERIOD_S, state=self.state(), models=models, readers=readers)
