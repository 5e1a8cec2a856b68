"""Statistics of the HTTP side of a process: a frozen snapshot for `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from staged_pool.api.limits.server_state import ServerState
from staged_pool.stages.meter import HistogramSnapshot

_PURPOSES: Final = ("bodies", "answers", "decodes")


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
    body_bytes: int
    memory_limit_bytes: float
    memory_fullness: float
    """Used part of the memory limit, or of a control group's."""
    memory_pressure: int
    memory_held: Mapping[str, tuple[int, int]]
    """Bytes that requests hold, and may hold, by purpose."""
    lag: HistogramSnapshot
    """Lag of the event loop, by sample."""
    finished: tuple[tuple[str, int, str, int], ...]
    """Finished requests: route, status, path through the server, and their number."""
    durations: Mapping[str, HistogramSnapshot]
    """Durations of finished requests, by route."""

    @staticmethod
    def of(
        state: ServerState, finished: Mapping[tuple[str, int, str], int], durations: Mapping[str, HistogramSnapshot]
    ) -> HttpStatistics:
        """Take a snapshot of a server."""
        memory = state.memory
        return HttpStatistics(
            connections=state.connections,
            connections_rejected=state.connections_rejected,
            connections_evicted=state.limit.evicted,
            requests=state.requests,
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
            finished=tuple((*key, count) for key, count in finished.items()),
            durations=durations,
        )
