"""One frozen snapshot of a running engine: what `/stages` shows and `/metrics` exports."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from staged_pool.stages.meter import StageStatistics


class Phase(enum.StrEnum):
    """Where an engine is in its life. It only ever moves down this list."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionStatistics:
    """What is inside the engine, and its limits."""

    requests: int
    max_requests: int
    items: int
    max_items: int
    body_bytes: int
    max_bytes: int
    admitted: int
    """Requests let in since the start."""
    refused: Mapping[str, int]
    """Requests refused since the start, by the limit that was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatistics:
    """What the device has done since the start."""

    batches: Mapping[str, int]
    """By the trigger that cut them."""
    items: int
    tokens: int
    """Of the items themselves, padding not counted."""
    padding_tokens: int
    wasted_tokens: int
    """Of items whose caller had left when their forward ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """One engine at one moment."""

    phase: Phase
    fault: str | None
    """Why the engine is broken; None while it is sound."""
    admission: AdmissionStatistics
    stages: tuple[StageStatistics, ...]
    """parse, preprocess, batch, postprocess."""
    device: DeviceStatistics
