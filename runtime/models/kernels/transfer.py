"""Copies between the host and a device that are begun by one line and waited for by another.

A GPU copies beside its own work where the memory of the host is pinned, and the thread that asked for a copy goes on at
once. What waits for its end waits for an event behind it in the stream, never for the whole device: other work may lie
there already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")

Later: TypeAlias = Callable[[], T]
"""Waits for what has been begun on the device, and gives what it made. Called once."""


class Mark:
    """A place in the stream of a device, behind everything that the calling thread has asked of the device so far.

    Args:
        device: A GPU; not always the current one of the thread.
        cuda: The part of torch that has its streams.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._event = cuda.Event(blocking=True)  # a waiting thread takes no core
        self._event.record(cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device has come to it."""
        self._event.synchronize()

    def precede(self, values: Tensor) -> None:
        """Have the device begin what the calling thread asks for from now on behind the mark.

        Args:
            values: What is read then. Its memory is kept for that long.
        """
        stream = self._cuda.current_stream(values.device)
        stream.wait_event(self._event)
        values.record_stream(stream)


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Take memory of the host that a GPU copies from and to by itself.

    It is torch's own, which gives it to nobody else before a copy that was begun has ended.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def send_arrays(parts: Sequence[NDArray[np.generic]], device: torch.device, *, stack: bool = False) -> Tensor:
    """Begin one copy of arrays of one dtype, which lie one behind the other then.

    Args:
        parts: At least one.
        device: Where they go.
        stack: Give them a dimension of their own, as `np.stack` does.
    """
    join = np.stack if stack else np.concatenate
    if device.type == "cpu":
        return torch.from_numpy(join(parts))
    first = parts[0].shape
    shape = (len(parts), *first) if stack else (sum(len(part) for part in parts), *first[1:])
    host = pinned(shape, torch.from_numpy(np.empty(0, parts[0].dtype)).dtype)
    join(parts, out=host.numpy())
    return host.to(device, non_blocking=True)


def begin_readback(rows: Tensor) -> Later[NDArray[np.float32]]:
    """Begin one copy to the host, as contiguous float32."""
    rows = rows.float()
    if rows.device.type == "cpu":
        values = np.ascontiguousarray(rows.numpy())
        return lambda: values
    host = pinned(tuple(rows.shape), torch.float32)
    host.copy_(rows, non_blocking=True)
    mark = Mark(rows.device)

    def arrived() -> NDArray[np.float32]:
        mark.wait()
        return host.numpy().copy()  # pinned memory is scarce: a row that is kept must not keep it

    return arrived


def hand_over(values: Tensor) -> Later[Tensor]:
    """Keep a tensor for whoever waits for it, and computes on with it in another stream of its device.

    What the host has to wait for in the middle is done there, while the next forward has begun already.
    """
    if values.device.type == "cpu":
        return lambda: values
    kept = values.clone()  # a forward that is replayed writes where the one before it wrote
    mark = Mark(kept.device)

    def taken() -> Tensor:
        mark.precede(kept)
        return kept

    return taken
