"""Copies between the host and a device that are begun by one line and waited for by another.

A GPU copies beside its own work where the memory of the host is pinned, and the thread that asked for a copy goes on at
once. What waits for its end waits for an event behind it in the stream, never for the whole device: other work may lie
there already.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")

Later: TypeAlias = Callable[[], T]
"""Waits for what has been begun on the device, and gives what it made. Called once."""

_BUFFERS: Final = 4
"""Two batches may be under way, and each lane has its own: nobody waits for a buffer."""


class Fence(Protocol):
    """A mark in a stream of work."""

    def record(self) -> None:
        """Put it behind everything that the calling thread has asked the device for."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has come to it."""
        ...


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int32, pin_memory=True)


def _fence() -> Fence:
    event: Fence = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a waiting thread takes no core
    return event


class Staging:
    """A ring of pinned buffers, through which the numbers of batches go to a device. Any thread may use it.

    A buffer is written again only when the copy of what was in it has ended.

    Args:
        device: Where they go.
        buffers: How many copies may be under way before one more waits.
        allocate: Makes a buffer of so many numbers.
        fence: Makes a mark for the end of a copy.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        buffers: int = _BUFFERS,
        allocate: Callable[[int], Tensor] = _pinned,
        fence: Callable[[], Fence] = _fence,
    ) -> None:
        self._device = device
        self._allocate = allocate
        self._buffers: list[Tensor | None] = [None] * buffers
        self._fences = [fence() for _ in range(buffers)]
        self._next = 0
        self._lock = threading.Lock()

    def send(self, size: int, fill: Callable[[NDArray[np.int32]], None]) -> Tensor:
        """Begin one copy of so many numbers.

        Args:
            size: At least 1.
            fill: Writes them into an array of zeros.

        Returns:
            [size], int32, on the device. What the calling thread asks of the device from now on comes after the copy.
        """
        with self._lock:
            place = self._next
            self._next = (place + 1) % len(self._buffers)
            buffer = self._buffers[place]
            if buffer is not None:
                self._fences[place].synchronize()
            if buffer is None or len(buffer) < size:
                buffer = self._buffers[place] = self._allocate(1 << (size - 1).bit_length())
            host = buffer[:size].zero_()
            fill(host.numpy())
            sent = torch.empty(size, dtype=torch.int32, device=self._device).copy_(host, non_blocking=True)
            self._fences[place].record()
        return sent


def staging_for(device: torch.device) -> Staging | None:
    """None for a device that computes in the memory of the host."""
    return None if device.type == "cpu" else Staging(device)


def send_arrays(parts: Sequence[NDArray[np.generic]], device: torch.device, *, stack: bool = False) -> Tensor:
    """Begin one copy of arrays of one dtype, which lie one behind the other then.

    Args:
        parts: At least one.
        device: Where they go.
        stack: Whether they get a dimension of their own, as `np.stack` gives them.
    """
    join = np.stack if stack else np.concatenate
    if device.type == "cpu":
        return torch.from_numpy(join(parts))
    first = parts[0].shape
    shape = (len(parts), *first) if stack else (sum(len(part) for part in parts), *first[1:])
    dtype = torch.from_numpy(np.empty(0, parts[0].dtype)).dtype
    # Of torch's own pinned memory, which it gives to nobody else before the copy has ended.
    host = torch.empty(shape, dtype=dtype, pin_memory=True)
    join(parts, out=host.numpy())
    return host.to(device, non_blocking=True)


def begin_readback(rows: Tensor) -> Later[NDArray[np.float32]]:
    """Begin one copy to the host, as contiguous float32."""
    rows = rows.float()
    if rows.device.type == "cpu":
        values = np.ascontiguousarray(rows.numpy())
        return lambda: values
    host = torch.empty(rows.shape, dtype=torch.float32, pin_memory=True)
    host.copy_(rows, non_blocking=True)
    fence = _fence()
    fence.record()

    def arrived() -> NDArray[np.float32]:
        fence.synchronize()
        return host.numpy().copy()  # pinned memory is scarce: a row that is kept must not keep it

    return arrived
