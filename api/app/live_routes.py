"""Route of the live feed: server-sent events for the page `/` and for `staged-pool top`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Final

import msgspec

from staged_pool.api.app.call import LIVE, Answer, Call, Handler
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.app.fleet import Fleet
from staged_pool.api.limits.http_statistics import HttpMeter, HttpStatistics
from staged_pool.api.limits.request_limits import party_of
from staged_pool.api.limits.server_state import ServerState
from staged_pool.api.live.feed import LiveFeed
from staged_pool.api.live.view import Moment
from staged_pool.api.status import TOO_MANY_REQUESTS, Problem
from staged_pool.runtime.memory.budget import ByteAccount
from staged_pool.runtime.statistics import EngineStatistics

MAX_CLIENTS: Final = 64
"""Most clients of the feed at once. Each costs the event loop about 0.1 ms for an event. One party leaves some of
them to others."""

EVENT_STREAM: Final = b"text/event-stream"

_HEADERS: Final = [
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back until the next one comes
]

_RETRY: Final = b"retry: 1000\n\n"
"""Milliseconds after which a browser connects again."""


class _Report(msgspec.Struct):
    """The report of a fleet, as far as the feed reads it."""

    models: dict[str, EngineStatistics]
    http: HttpStatistics | None


class LiveRoutes:
    """Handler of the live feed.

    Args:
        registry: The engines.
        http: Counts the clients of the feed.
        state: Tells when the server shuts down.
        fleet: Reports on all processes. None: there is only this one.
    """

    def __init__(self, registry: EngineRegistry, http: HttpMeter, state: ServerState, fleet: Fleet | None) -> None:
        self._registry = registry
        self._http = http
        self._state = state
        self._fleet = fleet
        self._places = ByteAccount(MAX_CLIENTS)
        self._feed = LiveFeed(self._take, lambda: registry.not_ready)

    def table(self) -> Mapping[str, Mapping[str, Handler]]:
        """Return the handlers by path and method."""
        return {LIVE: {"GET": self._live}}

    async def _take(self) -> Moment:
        if self._fleet is None:
            return Moment(time.time(), self._registry.statistics(), self._http.snapshot())
        report = msgspec.json.decode(await self._fleet.report("stages"), type=_Report)
        return Moment(time.time(), report.models, report.http)

    async def _live(self, call: Call) -> Answer:
        if call.lines is None:
            raise RuntimeError("events are sent by the application")
        with self._places.hold(party_of(call.scope)) as place:
            if not place.take(1):
                return Answer.of(self._full(), call.error_format)
            if call.scope["method"] == "HEAD":
                return Answer(content_type=EVENT_STREAM, headers=_HEADERS)
            call.lines.content_type, call.lines.further, call.lines.is_endless = EVENT_STREAM, _HEADERS, True
            self._http.live_clients += 1
            try:
                await call.lines.give(_RETRY)
                async with aclosing(self._feed.events()) as events:
                    async for event in events:
                        await call.lines.give(b"data: %s\n\n" % event)
                        if self._state.leaving:
                            break
            finally:
                self._http.live_clients -= 1
        return Answer()

    def _full(self) -> Problem:
        """Return the problem of a client for which there is no place."""
        message = f"At most {MAX_CLIENTS} clients may watch the server at once."
        if self._places.held_bytes < MAX_CLIENTS:
            message = f"{message} Of these, the rest is for other keys or, without keys, other addresses."
        return Problem(kind=TOO_MANY_REQUESTS, message=message, retry_after_s=1.0)
