"""Statistics of a pipeline: frozen snapshots for `/stages` and `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from staged_pool.stages.meter import HistogramSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStageStatistics:
    """One stage of a pipeline at one moment. Counts are of items since the start."""

    name: str
    window: int
    """Most items in it at once."""
    in_flight: int
    waiting: int
    """Items that wait for a place in it."""
    done: int
    """Items that passed it, or that it let vanish."""
    skipped: int
    """Items that failed in it and were left out."""
    failed: int
    """Items that failed in it, and their requests with them."""
    wait: HistogramSnapshot
    """Waits for a place."""
    service: HistogramSnapshot
    """Durations in it, without the wait for a place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStatistics:
    """One pipeline at one moment."""

    name: str
    requests: int
    """Requests in flight."""
    max_requests: int
    window: int
    """Most items in flight."""
    in_flight: int
    """Items between the first stage and the last."""
    waiting: int
    """Items that wait for a place in the window."""
    outcomes: Mapping[str, int]
    """Requests since the start, by outcome: answered, rejected, expired, cancelled, failed."""
    left: int
    """Calls of functions that still run in their threads, though their requests have ended."""
    drain_s: float
    """Predicted seconds for everything in flight."""
    stages: tuple[PipelineStageStatistics, ...]
