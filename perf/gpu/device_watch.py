"""Use of a device during a measurement: time between forwards, and the driver's own figure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from staged_pool.runtime.models.devices.launch import Launcher

_EVERY_S: Final = 0.05
"""Seconds between two questions to the driver."""


@dataclass(slots=True)
class DeviceUse:
    """Use of a device while a block ran."""

    forwards: int = 0
    idle: float | None = None
    """Share of the time without a forward on the device. None: unknown."""
    utilization: float | None = None
    """Mean share of the time in which the driver saw any kernel. None: it does not say."""


class TimedLauncher(Launcher):
    """A launcher that records an event on the device before and after each block.

    The first event is reached when the launch begins, or later, when the forward before has ended.

    Args:
        launcher: Launcher of the model, whose lock and stream are used.
        events: List of the events; `watched` empties it.
    """

    def __init__(self, launcher: Launcher, events: list[tuple[Any, Any]]) -> None:
        self._launcher = launcher
        self._events = events

    @contextmanager
    def launching(self) -> Iterator[None]:
        """See `Launcher.launching`."""
        with self._launcher.launching():
            began, ended = (_event() for _ in range(2))
            began.record()
            yield
            ended.record()
            self._events.append((began, ended))


@dataclass(slots=True, eq=False)
class DeviceWatch:
    """Watches one device; on a CPU it sees nothing.

    Args:
        device: The device.
    """

    device: torch.device
    events: list[tuple[Any, Any]] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[DeviceUse]:
        """Watch the device during a block; the figures are there at its end."""
        use, samples, over = DeviceUse(), list[float](), threading.Event()
        sampler = threading.Thread(target=self._sample, args=(samples, over), daemon=True)
        self.events.clear()
        sampler.start()
        try:
            yield use
        finally:
            over.set()
            sampler.join()
        use.utilization = sum(samples) / len(samples) if samples else None
        use.forwards = len(self.events)
        if len(self.events) > 1:
            use.idle = self._idle()

    def _idle(self) -> float:
        torch.cuda.synchronize(self.device)
        first, last = self.events[0][0], self.events[-1][1]
        busy_ms = sum(began.elapsed_time(ended) for began, ended in self.events)
        return max(0.0, 1.0 - float(busy_ms) / float(first.elapsed_time(last)))

    def _sample(self, samples: list[float], over: threading.Event) -> None:
        if self.device.type != "cuda":
            return
        with suppress(ModuleNotFoundError, RuntimeError):  # it needs NVIDIA's own package
            while not over.wait(_EVERY_S):
                samples.append(torch.cuda.utilization(self.device) / 100)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
