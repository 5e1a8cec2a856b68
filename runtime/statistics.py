"""One frozen snapshot of a running engine: what `/stages` shows and `/metrics` exports."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from staged_pool.stages.meter import HistogramSnapshot, StageStatistics


class Phase(enum.StrEnum):
    """Where an engine is in its life. It only ever moves down this list."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStatistics:
    """What is inside one lane: texts, or inputs with images."""

    tokens: int
    drain_s: float
    """How long it needs for everything inside it, as predicted."""
    lag_s: float
    """How much longer than predicted its requests have taken lately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionStatistics:
    """What is inside the engine, and its limits."""

    requests: int
    max_requests: int
    items: int
    max_items: int
    tokens: int
    """Estimated for what is not tokenized yet; what has left the device counts no more."""
    max_tokens: int
    body_bytes: int
    max_bytes: int
    admitted: int
    """Requests let in since the start."""
    refused: Mapping[str, int]
    """Requests refused since the start, by the limit that was reached; `delay` is the target delay, `deadline` that
    of the request itself, `part` what one tenant, or bulk work, may have of a limit."""
    drain_s: float
    """How long everything inside needs, as predicted: that of the slowest lane."""
    lag_s: float
    """How much longer than predicted requests have taken lately, in the lane where it is most."""
    bytes_per_token: float
    """Of texts, as learned."""
    tenants: int
    """That have something inside; one that has requests of both priorities counts twice."""
    lanes: Mapping[str, LaneStatistics]


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityStatistics:
    """Where the requests of one priority wait."""

    requests: int
    """Inside the engine."""
    waiting_requests: int
    """Requests with inputs that wait for their turn in front of preprocess."""
    waiting_items: int
    """Prepared, and in front of the device."""
    waiting_tokens: int
    """Of these."""
    wait: HistogramSnapshot
    """In front of the device, by item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatistics:
    """What one of the devices does, and has done since the start."""

    device: str
    """Such as `cuda:1`."""
    running: int
    """Batches on it."""
    batches: int
    """That have ended."""
    tokens: int
    """Of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatistics:
    """What the devices have done since the start."""

    devices: tuple[ReplicaStatistics, ...]
    """Each by itself."""

    batches: Mapping[str, int]
    """By the trigger that cut them."""
    holds: Mapping[str, int]
    """How often a free slot started nothing, by reason: `empty`, or `coming` (see `BatchDelay`)."""
    budget_tokens: Mapping[str, int]
    """Of a batch at most, now, by lane: the target of `target_batch_s` and the device's memory move it."""
    items: int
    coalesced_items: int
    """Beside those: items that were given the row of another one that was the same work."""
    tokens: int
    """Of the items themselves, padding not counted."""
    padding_tokens: int
    wasted_tokens: int
    """Of items whose caller had left when their forward ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCacheStatistics:
    """What the cache of prepared images has done since the start, and what it holds."""

    hits: int
    """Images that were at hand, or that another thread was preparing already."""
    misses: int
    """Images that were prepared, or could not be."""
    entries: int
    bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultCacheStatistics:
    """What the cache of rows has done since the start, and what it holds."""

    hits: int
    """Items whose row was at hand."""
    misses: int
    """Items that were looked up in vain."""
    entries: int
    bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """One engine at one moment."""

    phase: Phase
    fault: str | None
    """Why the engine takes no requests; None while it does."""
    admission: AdmissionStatistics
    cancelled: Mapping[str, int]
    """Requests whose caller left before the answer, by the stage that they were in."""
    expired: Mapping[str, int]
    """Requests whose deadline passed, or could not be met, by the stage that they were in."""
    overdue_preprocess_calls: int
    """Calls that have been running for longer than the alarm allows."""
    stages: tuple[StageStatistics, ...]
    """parse, preprocess, batch, postprocess; with preprocess_images and batch_images beside the ones for texts where
    the model reads both, or in their place where it reads images only."""
    priorities: Mapping[str, PriorityStatistics]
    """`interactive` and `bulk`."""
    device: DeviceStatistics
    image_cache: ImageCacheStatistics | None = None
    """None: prepared images are not kept, or the model reads none."""
    result_cache: ResultCacheStatistics | None = None
    """None: rows are not kept."""
