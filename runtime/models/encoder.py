"""A loaded model: towers for its lanes, on one or more devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from staged_pool.runtime.card import Lane
from staged_pool.runtime.models.devices.launch import Replica, Replicas
from staged_pool.runtime.models.input_preparer import InputPreparer
from staged_pool.runtime.models.kernels.torch_threads import ThreadPlan
from staged_pool.runtime.models.towers.tower import Tower
from staged_pool.runtime.payloads import Payload, PreparedImage, Row, SparseVector, Values
from staged_pool.runtime.statistics import ReplicaStatistics
from staged_pool.stages.errors import DeviceLost, ModelFailed, OutOfMemory
from staged_pool.stages.exhausted import is_out_of_memory

_WARM_UP_TOKENS: Final = 128
"""Tokens of a warm-up batch: enough for torch to use all of its threads."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoder(InputPreparer):
    """Loaded model, the `runtime.model.LoadedModel` of torch.

    Thread-safe. At most `card.forward_calls` threads may call `forward` at the same time.
    """

    replicas: Replicas
    """Weights of the model, once on each device."""
    plan: ThreadPlan
    each_alone: bool = False
    """Run each input in its own forward, so that no result depends on the batch."""

    @property
    def towers(self) -> Mapping[Lane, Tower]:
        """Towers of the first replica. Two lanes may share one tower."""
        return next(iter(self.replicas)).towers

    def forward(self, payloads: Sequence[Payload], at_once: int = 1, /) -> Sequence[Row | ModelFailed]:
        """Run one batch on the least busy device: one copy of the inputs to it, one copy of each output back.

        Args:
            payloads: At least one, all of one batch key.
            at_once: Number of forwards that share torch's threads.

        Returns:
            A row for each payload, or `ModelFailed` if its values are not finite.

        Raises:
            OutOfMemory: The device has no memory for this batch.
            DeviceLost: The device can no longer be trusted.
        """
        tokens = sum(payload.tokens for payload in payloads)
        with self.replicas.least_busy(tokens) as replica:
            self.plan.use(tokens, at_once)
            if self.each_alone:
                return [row for payload in payloads for row in compute(replica, [payload])]
            return compute(replica, payloads)

    def warm_up(self, lane: Lane) -> None:
        for replica in self.replicas:
            tower = replica.towers[lane]
            tokens = min(tower.max_tokens, _WARM_UP_TOKENS)
            self.plan.use(tokens)
            compute(replica, tower.sample_batch([tokens]))

    @property
    def devices(self) -> Sequence[ReplicaStatistics]:
        return self.replicas.statistics()

    def release(self) -> None:
        self.replicas.release()


def compute(replica: Replica, payloads: Sequence[Payload]) -> Sequence[Row | ModelFailed]:
    """Run one batch on one device, with the current number of torch threads; see `Encoder.forward`."""
    lane = _lane(payloads[0])
    with _device_errors(), torch.inference_mode():
        with replica.launching(lane):
            launched = replica.towers[lane].launch(payloads)
        columns = {output: values() for output, values in launched.items()}
    rows = [
        Row({output: values[place] for output, values in columns.items()}, payload)
        for place, payload in enumerate(payloads)
    ]
    return [
        row if all(map(_is_finite, row.values.values())) else ModelFailed("The model gave NaN or Inf for this input.")
        for row in rows
    ]


def _lane(payload: Payload) -> Lane:
    return "image" if isinstance(payload, PreparedImage) or payload.images else "text"


def _is_finite(values: Values) -> bool:
    numbers = values.values if isinstance(values, SparseVector) else values
    # The sum of squares is quicker, but may overflow where every number is finite.
    return math.isfinite(np.vdot(numbers, numbers)) or bool(np.isfinite(numbers).all())


@contextmanager
def _device_errors() -> Iterator[None]:
    """Translate errors of torch to errors of the engine."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemory("The server had no memory for this batch; send it again.") from error
    except RuntimeError as error:
        text = str(error)
        # First: a failed allocation may have any of these classes, and the device works on after it.
        if isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error):
            raise OutOfMemory("The device had no memory for this batch; send it again.") from error
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in text:
            raise DeviceLost(text) from error
        raise
