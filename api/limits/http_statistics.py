"""Statistics of the HTTP side of a process: a frozen snapshot for `/metrics`."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from staged_pool.api.asgi import Message, Send
from staged_pool.api.limits.server_state import ServerState
from staged_pool.stages.meter import BUCKETS_S, Histogram, HistogramSnapshot, LevelSeconds, Sizes, SizesSnapshot
from staged_pool.stages.timeline import Timeline

_PURPOSES: Final = ("bodies", "answers", "outcomes", "decodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationExemplar:
    """The newest traced request in one bucket of durations."""

    bucket: int
    """Index in `BUCKETS_S`; one more is the bucket above the last."""
    trace_id: str
    seconds: float
    at: float
    """Its end, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteStatistics:
    """Finished requests of one route for one model."""

    durations: HistogramSnapshot
    """Seconds of the requests."""
    items: SizesSnapshot
    """Items of each request that was answered."""
    tokens: SizesSnapshot
    """Tokens of each request that was answered."""
    answer_bytes: int
    """Bytes of the bodies of all answers."""
    exemplars: tuple[DurationExemplar, ...] = ()
    """Traced requests, at most one for each bucket of `durations`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpStatistics:
    """Connections, requests and memory of one process at one moment."""

    connections: int
    connections_rejected: int
    """Connections closed on arrival, since the start."""
    connections_evicted: int
    """Connections closed to make room, since the start."""
    requests: int
    """HTTP requests in progress."""
    unread: int
    """Answers that are being sent to their clients."""
    reader_s: float
    """Seconds in which answers were being sent, summed over answers. A client that reads slowly takes long."""
    body_bytes: int
    memory_limit_bytes: float
    memory_fullness: float
    """Used part of the memory limit, or of a control group's."""
    memory_pressure: int
    memory_held: Mapping[str, tuple[int, int]]
    """Bytes that requests hold, and may hold, by purpose."""
    lag: HistogramSnapshot
    """Lag of the event loop, by sample."""
    gc: Mapping[str, HistogramSnapshot]
    """Seconds of garbage collections, by generation."""
    live_clients: int
    """Clients of the live events."""
    finished: tuple[tuple[str, str, int, str, int], ...]
    """Finished requests: route, model, status, path through the server, and their number. "" is no model."""
    routes: Mapping[str, Mapping[str, RouteStatistics]]
    """Durations and sizes of finished requests, by route and model."""


@dataclass(slots=True)
class _Route:
    durations: Histogram = field(default_factory=Histogram)
    items: Sizes = field(default_factory=Sizes)
    tokens: Sizes = field(default_factory=Sizes)
    answer_bytes: int = 0
    exemplars: dict[int, DurationExemplar] = field(default_factory=dict)

    def traced(self, trace_id: str, seconds: float) -> None:
        """Keep a traced request as the newest one of its bucket."""
        bucket = bisect_left(BUCKETS_S, seconds)
        self.exemplars[bucket] = DurationExemplar(bucket=bucket, trace_id=trace_id, seconds=seconds, at=time.time())

    def snapshot(self) -> RouteStatistics:
        return RouteStatistics(
            durations=self.durations.snapshot(),
            items=self.items.snapshot(),
            tokens=self.tokens.snapshot(),
            answer_bytes=self.answer_bytes,
            exemplars=tuple(self.exemplars.values()),
        )


class HttpMeter:
    """Counts finished requests, and the time that clients take to read their answers.

    Args:
        state: State of the HTTP server.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._counts: Counter[tuple[str, str, int, str]] = Counter()
        self._routes: dict[str, dict[str, _Route]] = {}
        self._sending = LevelSeconds()
        self.live_clients = 0
        """Clients of the live events."""

    def finished(
        self,
        route: str,
        model: str,
        status: int,
        path_taken: str,
        *,
        seconds: float,
        answer_bytes: int,
        timeline: Timeline | None,
        trace_id: str | None = None,
    ) -> None:
        """Count one finished request.

        Args:
            route: A known route, never a client's path: labels must stay few.
            model: Name of the served model; "" if none was chosen.
            status: Status of the answer, or 499 if the client left.
            path_taken: Path through the server: fast or general.
            seconds: Duration of the request.
            answer_bytes: Bytes of the body of the answer.
            timeline: Amounts of the request. None: it was no work for an engine.
            trace_id: Id of its trace. None: it is not traced.
        """
        self._counts[route, model, status, path_taken] += 1
        models = self._routes.setdefault(route, {})
        if (counted := models.get(model)) is None:
            counted = models[model] = _Route()
        counted.durations.observe(seconds)
        counted.answer_bytes += answer_bytes
        if trace_id is not None:
            counted.traced(trace_id, seconds)
        if timeline is not None and timeline.items and status == 200:
            counted.items.observe(timeline.items)
            counted.tokens.observe(timeline.tokens)

    def timed(self, send: Send) -> Send:
        """Return ASGI's `send`, with its time counted as that of the client who reads."""
        sending = self._sending

        async def timed(message: Message) -> None:
            sending.up(time.perf_counter())
            try:
                await send(message)
            finally:
                sending.down(time.perf_counter())

        return timed

    def snapshot(self) -> HttpStatistics:
        """Take a snapshot of the HTTP side."""
        state, memory = self._state, self._state.memory
        return HttpStatistics(
            connections=state.connections,
            connections_rejected=state.connections_rejected,
            connections_evicted=state.limit.evicted,
            requests=state.requests,
            unread=self._sending.level,
            reader_s=self._sending.seconds(time.perf_counter()),
            body_bytes=state.body_bytes,
            memory_limit_bytes=memory.limit_bytes,
            memory_fullness=memory.fullness,
            memory_pressure=int(memory.pressure),
            memory_held={
                purpose: (account.held_bytes, account.limit_bytes)
                for purpose in _PURPOSES
                for account in (getattr(memory.budget, purpose),)
            },
            lag=state.lag.snapshot(),
            gc=state.gc.snapshot(),
            live_clients=self.live_clients,
            finished=tuple((*key, count) for key, count in self._counts.items()),
            routes={
                route: {model: counted.snapshot() for model, counted in models.items()}
                for route, models in self._routes.items()
            },
        )
