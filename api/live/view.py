"""The view of a server at one moment: rates, waits and sizes of the last seconds, ready to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from staged_pool.api.limits.http_statistics import HttpStatistics
from staged_pool.runtime.statistics import AdmissionStatistics, EngineStatistics, RecentBatch
from staged_pool.stages.meter import BUCKETS_S, HistogramSnapshot, SizesSnapshot, StageStatistics

CARDS: Final = ("parse", "preprocess", "batch", "postprocess")
"""The four stages as cards: the lanes of texts and images share a card."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The statistics of a server at one time."""

    at: float
    """Seconds since the epoch."""
    engines: Mapping[str, EngineStatistics]
    http: HttpStatistics | None
    """None: the process has no HTTP side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """One stage of one lane, in the last seconds."""

    name: str
    """Name of the stage, such as `preprocess_images`."""
    card: str
    """One of `CARDS`."""
    waiting: int
    workers: int
    busy: float
    """Part of the workers' time in which they processed items, 0 to 1. For batch, slots instead of workers."""
    blocked: float
    """Part of the workers' time that they waited for the next stage, 0 to 1."""
    rate: float
    """Items a second that the stage has finished; for parse, requests."""
    wait_s: float
    """Mean wait of an item for the stage, in seconds; at least the age of the oldest one if none has left."""
    work_s: float
    """Mean time of an item with a worker, in seconds. For batch, of a batch on the device."""
    oldest_s: float
    dropped: int
    """Items that ended in the stage, since the start."""
    crashes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LimiterView:
    """A limit on calls at once."""

    used: int
    slots: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorView:
    """Admission: the requests that come, are in flight and are rejected."""

    offered: float
    """Requests a second that asked for admission."""
    admitted: float
    rejected: float
    requests: int
    max_requests: int
    tokens: int
    max_tokens: int
    delay_s: float
    """Predicted seconds until everything in flight is done."""
    target_delay_s: float
    """Predicted delay from which on requests are rejected, in seconds."""
    reasons: Mapping[str, int]
    """Rejected requests since the start, by reason."""
    lately: Mapping[str, int]
    """Rejected requests of the last seconds, by reason; those without any are left out."""
    offered_total: int
    """Requests since the start that asked for admission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One model."""

    seconds: float
    """Time over which rates, parts and means were taken, in seconds."""
    phase: str
    fault: str | None
    stall: str | None
    dtype: str
    device: str
    width: int
    door: DoorView
    stages: Sequence[StageView]
    limiters: Mapping[str, LimiterView]
    answers: float
    """Requests a second that were answered."""
    p50_s: float | None
    """Half of the requests answered in the last seconds took at most this long. None: there were none."""
    p99_s: float | None
    tokens: float
    """Tokens a second that the device has computed, without padding."""
    padding: float
    """Padding tokens as a part of all tokens of the last seconds."""
    full: float
    """Part of the batches in the last seconds that were cut full, 0 to 1."""
    batches: Sequence[RecentBatch]
    sizes: Mapping[str, int]
    """Batches of the last seconds, by the most items that the bucket holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderView:
    """Answers on their way to clients."""

    unread: float
    """Mean number of answers that were being sent, in the last seconds."""
    requests: int
    """HTTP requests in progress."""
    connections: int
    late_s: float
    """Largest recent lag of the event loop in seconds, rounded up to a bucket."""


def view_model(now: Moment, before: Moment, name: str) -> ModelView:
    """Return the view of one model over the time between two moments.

    Args:
        now: The newer moment, which has the model.
        before: The older moment. If it lacks the model, all rates are 0.
        name: Name of the model.
    """
    new = now.engines[name]
    old = before.engines.get(name, new)
    seconds = max(now.at - before.at, 1e-9)
    earlier = {stage.name: stage for stage in old.stages}
    device, device_before = new.device, old.device
    tokens = device.tokens - device_before.tokens
    padding = device.padding_tokens - device_before.padding_tokens
    cut = {trigger: count - device_before.batches.get(trigger, 0) for trigger, count in device.batches.items()}
    return ModelView(
        seconds=seconds,
        phase=new.phase,
        fault=new.fault,
        stall=new.stall,
        dtype=new.model.dtype,
        device=new.model.device,
        width=new.model.width,
        door=_door(new.admission, old.admission, seconds),
        stages=[_stage(stage, earlier.get(stage.name, stage), seconds) for stage in new.stages],
        limiters={
            limiter: LimiterView(used=each.used, slots=each.slots, waiting=each.waiting)
            for limiter, each in new.limiters.items()
        },
        answers=(new.answered.count - old.answered.count) / seconds,
        p50_s=quantile(new.answered, old.answered, 0.5),
        p99_s=quantile(new.answered, old.answered, 0.99),
        tokens=tokens / seconds,
        padding=padding / (tokens + padding) if tokens + padding else 0.0,
        full=(cut.get("cost", 0) + cut.get("size", 0)) / max(1, sum(cut.values())),
        batches=device.recent,
        sizes=_sizes(
            [each.items for each in device.sizes.values()], [each.items for each in device_before.sizes.values()]
        ),
    )


def view_readers(now: Moment, before: Moment) -> ReaderView | None:
    """Return the view of the answers on their way; None without an HTTP side."""
    if now.http is None:
        return None
    old = before.http or now.http
    lag = [new - count for new, count in zip(now.http.lag.counts, old.lag.counts, strict=True)]
    last = max((place for place, count in enumerate(lag) if count), default=-1)
    return ReaderView(
        unread=(now.http.reader_s - old.reader_s) / max(now.at - before.at, 1e-9),
        requests=now.http.requests,
        connections=now.http.connections,
        late_s=0.0 if last < 0 else BUCKETS_S[min(last, len(BUCKETS_S) - 1)],
    )


def quantile(now: HistogramSnapshot, before: HistogramSnapshot, part: float) -> float | None:
    """Return a quantile of the durations between two snapshots, in seconds; None if there are none.

    Within a bucket, durations count as evenly spread, as in Prometheus' `histogram_quantile`.

    Args:
        now: The newer snapshot.
        before: The older snapshot of the same histogram.
        part: 0.5 for the median.
    """
    counts = [new - old for new, old in zip(now.counts, before.counts, strict=True)]
    total = sum(counts)
    if total <= 0:
        return None
    rank, below = part * total, 0
    for place, count in enumerate(counts):
        if count and below + count >= rank:
            if place == len(BUCKETS_S):
                return BUCKETS_S[-1]
            low = BUCKETS_S[place - 1] if place else 0.0
            return low + (BUCKETS_S[place] - low) * (rank - below) / count
        below += count
    return BUCKETS_S[-1]


def _stage(now: StageStatistics, before: StageStatistics, seconds: float) -> StageView:
    capacity_s = seconds * now.workers
    left = now.wait.count - before.wait.count
    wait_s = (now.wait.sum_s - before.wait.sum_s) / left if left else (now.oldest_s if now.waiting else 0.0)
    worked = now.service.count - before.service.count
    return StageView(
        name=now.name,
        card=card_of(now.name),
        waiting=now.waiting,
        workers=now.workers,
        busy=min(1.0, (now.busy_s - before.busy_s) / capacity_s),
        blocked=min(1.0, (now.blocked_s - before.blocked_s) / capacity_s),
        rate=(now.done - before.done) / seconds,
        wait_s=wait_s,
        work_s=(now.service.sum_s - before.service.sum_s) / worked if worked else 0.0,
        oldest_s=now.oldest_s,
        dropped=sum(now.dropped.values()),
        crashes=now.crashes,
    )


def card_of(stage: str) -> str:
    """Return the card of a stage, one of `CARDS`."""
    return stage.removesuffix("_images")


def _door(now: AdmissionStatistics, before: AdmissionStatistics, seconds: float) -> DoorView:
    rejected, rejected_before = sum(now.refused.values()), sum(before.refused.values())
    admitted = now.admitted - before.admitted
    return DoorView(
        offered=(admitted + rejected - rejected_before) / seconds,
        admitted=admitted / seconds,
        rejected=(rejected - rejected_before) / seconds,
        requests=now.requests,
        max_requests=now.max_requests,
        tokens=now.tokens,
        max_tokens=now.max_tokens,
        delay_s=now.drain_s,
        target_delay_s=now.target_delay_s,
        reasons=now.refused,
        lately={
            reason: count - before.refused.get(reason, 0)
            for reason, count in now.refused.items()
            if count > before.refused.get(reason, 0)
        },
        offered_total=now.admitted + rejected,
    )


def _sizes(now: Sequence[SizesSnapshot], before: Sequence[SizesSnapshot]) -> Mapping[str, int]:
    """Count the batches between two moments, by the upper bound of their bucket."""
    found: dict[str, int] = {}
    for new, old in zip(now, before, strict=False):
        bounds = (*(f"{bound:g}" for bound in new.bounds), "more")
        for bound, count, earlier in zip(bounds, new.counts, old.counts, strict=True):
            if count > earlier:
                found[bound] = found.get(bound, 0) + count - earlier
    return found
