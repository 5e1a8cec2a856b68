"""The parts that a batch stage is built from: its device, its scheduling, and nearby work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from staged_pool.stages.errors import StagedPoolError
from staged_pool.stages.offload import Offload
from staged_pool.stages.scheduling.batch_budget import Budget
from staged_pool.stages.scheduling.batch_former import BatchFormer
from staged_pool.stages.scheduling.coalescing import RowReuse
from staged_pool.stages.scheduling.service_time import ServiceTimeModel
from staged_pool.stages.ticket import Item

P = TypeVar("P")
R = TypeVar("R")
P_contra = TypeVar("P_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


class Forward(Protocol[P_contra, R_co]):
    """Runs payloads through the model, and returns one result for each.

    It is called on one of the device's threads.

    Args:
        payloads: At least one.
        at_once: Number of forwards that share the device: 1 if this one has it to itself.
    """

    def __call__(self, payloads: Sequence[P_contra], at_once: int, /) -> Sequence[R_co | StagedPoolError]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDevice(Generic[P, R]):
    """The device of a batch stage, and the number of batches that it takes."""

    forward: Forward[P, R]
    offload: Offload
    """Runs the forwards, `slots` of them at once. Further calls wait. `DeviceLost` from it ends the stage."""
    slots: int = 1
    """Forwards at once."""
    ahead: int = 1
    """Most batches that are handed over before a slot is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScheduling(Generic[P, R]):
    """The queue in front of the device, with the limit and predictions of its batches."""

    former: BatchFormer[Item[P]]
    """Holds the queue, and cuts batches out of it."""
    service_time: ServiceTimeModel
    """Learns the seconds of the whole device from each batch that took one forward."""
    budget: Budget
    """Token budget of the former's batches."""
    fed_tokens: int
    """Maximum of estimated tokens that feeding lets in. If more wait, the stage drops items of settled tickets."""
    reuse: RowReuse[P, R] | None = None
    """Reuse of rows for items of equal identity. None: each item is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearbyWork:
    """Work outside the stage that affects when a batch starts. Each field reads the present value."""

    preparing: Callable[[], int]
    """Items that the preprocess stage of this lane works on."""
    ready_s: Callable[[], float]
    """Recent mean duration of a preprocess call, in seconds."""
    elsewhere: Callable[[], int] = lambda: 0
    """Calls of other lanes on the cores that forwards compute on."""
    core_is_free: Callable[[], bool] = lambda: True
    """True if one more forward would take a core from no call of this lane."""
