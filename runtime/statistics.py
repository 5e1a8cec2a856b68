"""Statistics: a frozen snapshot of a running engine, for `/stages` and `/metrics`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from staged_pool.stages.meter import HistogramSnapshot, SizesSnapshot, StageStatistics

if TYPE_CHECKING:
    import anyio

FETCH_OUTCOMES: Final = ("fetched", "failed", "abandoned")
"""Outcomes of the fetch of an image."""

REJECTION_REASONS: Final = ("requests", "items", "tokens", "bytes", "part", "delay", "deadline")
"""Limits of admission, and other reasons to reject a request."""


class Phase(enum.StrEnum):
    """The phase of an engine's life. It only moves down this list."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStatistics:
    """Amounts in flight in one lane: texts, or inputs with images."""

    tokens: int
    drain_s: float
    """Predicted seconds for everything in flight in it."""
    lag_s: float
    """Mean time of recent requests beyond the prediction, in seconds."""
    headroom_s: float
    """Seconds between the target delay and the largest accepted prediction: late answers raise it."""
    rejected: Mapping[str, int]
    """Requests rejected for their predicted delay since the start, by what made it too long.

    `work` is the work ahead of a request and its own, and `lag` what recent requests took beyond that.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionStatistics:
    """Amounts in flight, and their limits."""

    requests: int
    max_requests: int
    items: int
    max_items: int
    tokens: int
    """Tokens that the device has still to compute; an estimate for inputs that are not tokenized yet."""
    max_tokens: int
    body_bytes: int
    max_bytes: int
    admitted: int
    """Requests admitted since the start."""
    refused: Mapping[str, int]
    """Requests rejected since the start, by the limit that was reached.

    Public name, kept: everything else calls these requests rejected.

    See `REJECTION_REASONS`. `delay` is the target delay, and `deadline` the time limit of the request. `part` is the
    share of a limit for one tenant, or for bulk work.
    """
    target_delay_s: float
    """Predicted delay from which on requests are rejected, in seconds."""
    retry_after: HistogramSnapshot
    """Seconds after which rejected requests were told to come again."""
    drain_s: float
    """Predicted seconds for everything in flight, in the slowest lane."""
    lag_s: float
    """Mean time of recent requests beyond the prediction, in seconds, in the worst lane."""
    bytes_per_token: float
    """Bytes of a text for each token, as learned."""
    tenants: int
    """Tenants with requests in flight. One with requests of both priorities counts twice."""
    lanes: Mapping[str, LaneStatistics]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLoad:
    """Load of one lane, for a router."""

    drain_s: float
    """Predicted seconds for everything in flight in it."""
    utilization: float
    """Mean part of the device's slots that was taken of late, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of an engine, for a router."""

    requests: int
    """Requests in flight."""
    running: int
    """Requests in flight with an input on the device."""
    requests_per_second: float
    """Answered requests a second, of the last seconds."""
    fullness: float
    """Used part of the limit of admission that is nearest, 0 to 1."""
    lanes: Mapping[str, LaneLoad]


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityStatistics:
    """Requests of one priority, by where they wait."""

    requests: int
    """Requests in flight."""
    waiting_requests: int
    """Requests with inputs that wait in front of preprocess."""
    waiting_items: int
    """Items that wait in front of the device."""
    waiting_tokens: int
    """Tokens of these items."""
    wait: HistogramSnapshot
    """Waits of items in front of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatistics:
    """The work of one device, now and since the start."""

    device: str
    """Such as `cuda:1`."""
    running: int
    """Batches on the device."""
    batches: int
    """Batches that have ended."""
    tokens: int
    """Tokens of the batches that have ended."""
    busy_s: float
    """Seconds in which at least one batch was on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Sizes of the batches of one lane since the start."""

    items: SizesSnapshot
    tokens: SizesSnapshot
    """Tokens with padding."""
    fill: SizesSnapshot
    """Used part of the token budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentBatch:
    """One of the newest batches."""

    lane: str
    age_s: float
    """Seconds since it got its slot."""
    seconds: float
    """Seconds until the end of its last forward."""
    items: int
    tokens: int
    """Tokens with padding."""
    fill: float
    """Used part of the token budget."""
    trigger: str
    """See `BatchTrigger`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatistics:
    """The work of all devices since the start."""

    devices: tuple[ReplicaStatistics, ...]
    """Each device by itself."""

    batches: Mapping[str, int]
    """Batches by the reason that they were cut for; see `BatchTrigger`."""
    holds: Mapping[str, int]
    """Times that a free slot started nothing, by reason; see `Hold.reason`."""
    hold_s: Mapping[str, float]
    """Seconds that a free slot started nothing although items waited, by `Hold.reason`."""
    running_s: float
    """Seconds for which the oldest forward has run; 0 if none runs."""
    sizes: Mapping[str, BatchSizes]
    """Sizes of the batches, by lane."""
    recent: tuple[RecentBatch, ...]
    """The newest batches that have ended, oldest first in each lane."""
    budget_tokens: Mapping[str, int]
    """Most tokens of a batch at present, by lane. `target_batch_s` and lack of memory lower it."""
    items: int
    coalesced_items: int
    """Further items, which got the row of another item of equal identity."""
    tokens: int
    """Tokens of the items, without padding."""
    padding_tokens: int
    wasted_tokens: int
    """Tokens of items whose caller had left when their forward ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimiterStatistics:
    """Use of a limit on calls at once, such as on fetches."""

    used: int
    slots: int
    waiting: int
    """Calls that wait for a slot."""

    @staticmethod
    def of(limiter: anyio.CapacityLimiter) -> LimiterStatistics:
        """Return the use of a limiter."""
        now = limiter.statistics()
        return LimiterStatistics(used=now.borrowed_tokens, slots=int(now.total_tokens), waiting=now.tasks_waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCacheStatistics:
    """Hits, misses and size of the cache of prepared images."""

    hits: int
    """Images that were cached, or that another thread was preparing already."""
    misses: int
    """Images that had to be prepared."""
    entries: int
    bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultCacheStatistics:
    """Hits, misses and size of the result cache."""

    hits: int
    """Items whose row was cached."""
    misses: int
    """Items whose row was not cached."""
    entries: int
    bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginStatistics:
    """The requests and hooks of one plugin."""

    open: int
    """Requests that are not released yet."""
    running: Mapping[str, int]
    """Hooks that run, by name."""
    loading: int
    """Requests in the first hooks, or with loaded data that waits for preprocess."""
    cancelled: Mapping[str, int]
    """Requests that nobody waited for any more, by the last hook that had begun."""
    blocked: Mapping[str, int]
    """Steps of awaited hooks that blocked the event loop, by hook."""
    seconds: Mapping[str, HistogramSnapshot]
    """Seconds of each hook, for released requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The loaded model, for metrics and the live page."""

    dtype: str
    device: str
    """Name of the device; several names with commas between them."""
    width: int
    """Width of a dense vector; 0 if there is none."""
    load_s: float
    """Seconds from the first byte read to the end of the warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """One engine at one moment."""

    model: ModelFacts
    phase: Phase
    fault: str | None
    """Reason why the engine takes no requests; None while it does."""
    stall: str | None
    """Reason if a forward runs far longer than predicted; the engine takes requests all the same."""
    admission: AdmissionStatistics
    cancelled: Mapping[str, int]
    """Requests whose caller left before the answer, by stage."""
    expired: Mapping[str, int]
    """Requests whose deadline passed or could not be met, by stage."""
    overdue_preprocess_calls: int
    """Preprocess calls that run for longer than the alarm allows."""
    answered: HistogramSnapshot
    """Seconds of answered requests, from admission to the answer."""
    stages: tuple[StageStatistics, ...]
    """All stages in order: parse, preprocess, batch, postprocess.

    A model that reads images has preprocess_images and batch_images, too, or only these if it reads no texts.
    """
    priorities: Mapping[str, PriorityStatistics]
    """`interactive` and `bulk`."""
    device: DeviceStatistics
    limiters: Mapping[str, LimiterStatistics]
    """Limits on calls at once:

    - `preprocess`: Threads that tokenize. Models of one group share them.
    - `answers`: Threads that decode large requests and make large answers. Models of one group share them.
    - `fetch`: Inputs with images by URL.
    - `load`: Requests in the first hooks of a plugin.
    """
    fetches: Mapping[str, HistogramSnapshot]
    """Seconds of fetches and the wait for them, by outcome; see `FETCH_OUTCOMES`."""
    image_cache: ImageCacheStatistics | None = None
    """None: images are not cached, or the model reads none."""
    result_cache: ResultCacheStatistics | None = None
    """None: rows are not cached."""
    plugin: PluginStatistics | None = None
    """None: the engine is no plugin's."""
