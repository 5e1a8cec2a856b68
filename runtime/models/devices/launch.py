"""In which order forwards begin on a device, and on which of several devices.

On a GPU a forward is two things: the host asks for its kernels, and the device computes them. While the device is at
one forward the host asks for the next, so that the device goes on without a pause. Two threads do that: each asks under
the lock of a `Launcher`, and waits outside of it. On the CPU both are one, and there is nothing to lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from staged_pool.runtime.model import Lane
from staged_pool.runtime.models.towers.tower import Tower
from staged_pool.runtime.statistics import ReplicaStatistics


class Launcher:
    """Lets one forward begin at a time, each behind the one before, on a stream of its own.

    Args:
        device: Where they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.Lock()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # weights came by another stream, which this one does not wait for
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def launching(self) -> Iterator[None]:
        """In the block, whatever the thread asks of the device comes behind what was asked here before."""
        with ExitStack() as stack:
            stack.enter_context(self._lock)
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            yield


@dataclass(slots=True, eq=False)
class Replica:
    """The weights of a model on one device, and what they have done."""

    device: torch.device
    towers: Mapping[Lane, Tower]
    launchers: Mapping[Lane, Launcher] = field(default_factory=dict)
    """For the lanes whose forwards begin one after the other; those of others may all run at once."""
    running: int = 0
    """Forwards that have begun and not ended."""
    batches: int = 0
    tokens: int = 0
    token_bytes: float = 0.0
    """Memory that a forward takes for each token of its batch, on a GPU."""

    def launching(self, lane: Lane) -> AbstractContextManager[None]:
        """See `Launcher`."""
        return self.launchers[lane].launching() if lane in self.launchers else nullcontext()


class Replicas:
    """Those of one model, each on a device of its own. Any thread may use it.

    Args:
        replicas: At least one, all of the same weights.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = tuple(replicas)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    @contextmanager
    def freest(self, tokens: int) -> Iterator[Replica]:
        """The one with the fewest forwards, which the block adds one to.

        Args:
            tokens: Of that forward.
        """
        with self._lock:
            replica = min(self._replicas, key=lambda one: one.running)
            replica.running += 1
        try:
            yield replica
        finally:
            with self._lock:
                replica.running -= 1
                replica.batches += 1
                replica.tokens += tokens

    def statistics(self) -> tuple[ReplicaStatistics, ...]:
        with self._lock:
            return tuple(
                ReplicaStatistics(device=str(one.device), running=one.running, batches=one.batches, tokens=one.tokens)
                for one in self._replicas
            )
