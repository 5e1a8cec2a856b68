"""Asynchronous copies between the host and a device.

With pinned host memory, a GPU copies beside its other work, and the thread that began the copy goes on at once. A copy
is awaited by an event in the stream, never by waiting for the whole device: the next forward may be queued already.
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
"""Waits for work that the device has begun, and returns its result. To be called once."""


class StreamEvent:
    """A CUDA event after all work that the calling thread has queued on a device.

    Args:
        device: A GPU; not always the current one of the thread.
        cuda: torch's module with streams and events.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._event = cuda.Event(blocking=True)  # a waiting thread takes no core
        self._event.record(cuda.current_stream(device))

    def wait(self) -> None:
        """Block until the device has reached the event."""
        self._event.synchronize()

    def precede(self, values: Tensor) -> None:
        """Make later work of the calling thread wait for the event, on the device.

        Args:
            values: A tensor that the later work reads. Its memory is kept until then.
        """
        stream = self._cuda.current_stream(values.device)
        stream.wait_event(self._event)
        values.record_stream(stream)


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate pinned host memory, which a GPU copies from and to by itself.

    It comes from torch's cache, which reuses it only after the copies that use it have ended.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def send_arrays(parts: Sequence[NDArray[np.generic]], device: torch.device, *, stack: bool = False) -> Tensor:
    """Begin one copy of arrays to a device, joined into one tensor.

    Args:
        parts: At least one array, all of one dtype.
        device: The destination.
        stack: Join along a new first dimension, as `np.stack` does; else along the first.
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
    """Begin one copy of a tensor to the host, as contiguous float32."""
    rows = rows.float()
    if rows.device.type == "cpu":
        values = np.ascontiguousarray(rows.numpy())
        return lambda: values
    host = pinned(tuple(rows.shape), torch.float32)
    host.copy_(rows, non_blocking=True)
    event = StreamEvent(rows.device)

    def arrived() -> NDArray[np.float32]:
        event.wait()
        return host.numpy().copy()  # pinned memory is scarce: a row that a cache keeps must not hold it

    return arrived


def hand_over(values: Tensor) -> Later[Tensor]:
    """Keep a tensor for further computation in another stream of its device.

    A head whose output size is known to the device alone waits in that stream, while the next forward runs.
    """
    if values.device.type == "cpu":
        return lambda: values
    kept = values.clone()  # the next replay of a graph overwrites the original
    event = StreamEvent(kept.device)

    def taken() -> Tensor:
        event.precede(kept)
        return kept

    return taken
