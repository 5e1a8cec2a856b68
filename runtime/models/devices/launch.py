"""Replicas of a model on several devices, and the launch order of forwards.

On a GPU, the host launches the kernels of a forward, and the device computes them later. While it computes one forward,
the host launches the next, so the device does not pause. Two threads do this: each launches under the lock of a
`Launcher`, and waits for the results outside of it. A CPU needs no lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from staged_pool.runtime.card import Lane
from staged_pool.runtime.models.towers.tower import Tower
from staged_pool.runtime.statistics import ReplicaStatistics
from staged_pool.stages.meter import LevelSeconds


class Launcher:
    """Lock and stream of one lane on one device: forwards start one after the other.

    Args:
        device: Device of the weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.Lock()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # weights were copied on another stream, which the new one does not wait for
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Open a block whose kernels run behind those of the blocks before it."""
        with ExitStack() as stack:
            stack.enter_context(self._lock)
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            yield


@dataclass(slots=True, eq=False)
class Replica:
    """Weights of a model on one device, with counters of their work."""

    device: torch.device
    towers: Mapping[Lane, Tower]
    launchers: Mapping[Lane, Launcher] = field(default_factory=dict)
    """Launchers of lanes whose forwards start one after the other. Forwards of other lanes run concurrently."""
    running: int = 0
    """Forwards that have started and not ended."""
    batches: int = 0
    tokens: int = 0
    busy: LevelSeconds = field(default_factory=LevelSeconds)
    """Time with at least one forward."""
    token_bytes: float = 0.0
    """GPU memory of a forward, in bytes for each token of its batch."""

    def launching(self, lane: Lane) -> AbstractContextManager[None]:
        """Open a block that launches a forward; see `Launcher.launching`."""
        return self.launchers[lane].launching() if lane in self.launchers else nullcontext()


class Replicas:
    """Replicas of one model, each on a device of its own. Thread-safe.

    Args:
        replicas: At least one, all with the same weights.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = tuple(replicas)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def release(self) -> None:
        """Drop the weights, and return the memory that torch keeps of them on a GPU."""
        on_gpus = any(replica.device.type == "cuda" for replica in self._replicas)
        self._replicas = ()
        if on_gpus:
            torch.cuda.empty_cache()

    @contextmanager
    def least_busy(self, tokens: int) -> Iterator[Replica]:
        """Open a block that runs a forward on the replica with the fewest forwards.

        Args:
            tokens: Tokens of the forward.
        """
        with self._lock:
            replica = min(self._replicas, key=lambda replica: replica.running)
            replica.running += 1
            if replica.running == 1:
                replica.busy.up(time.perf_counter())
        try:
            yield replica
        finally:
            with self._lock:
                replica.running -= 1
                if not replica.running:
                    replica.busy.down(time.perf_counter())
                replica.batches += 1
                replica.tokens += tokens

    def statistics(self) -> tuple[ReplicaStatistics, ...]:
        with self._lock:
            now = time.perf_counter()
            return tuple(
                ReplicaStatistics(
                    device=str(replica.device),
                    running=replica.running,
                    batches=replica.batches,
                    tokens=replica.tokens,
                    busy_s=replica.busy.seconds(now),
                )
                for replica in self._replicas
            )
