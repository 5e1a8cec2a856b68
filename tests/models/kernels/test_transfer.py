"""Copies to a device and back: one line begins them, another waits for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from staged_pool.runtime.models.kernels.transfer import StreamEvent, begin_readback, hand_over, send_arrays

CPU = torch.device("cpu")


class LoggedCuda:
    """Double of CUDA streams that logs its calls. The calling thread has another one on each device."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(
            name=f"stream of {device}", wait_event=lambda event: self.log.append(f"stream of {device} waits")
        )

    def Event(self, *, blocking: bool) -> Any:  # as torch has it
        return SimpleNamespace(
            record=lambda stream: self.log.append(f"recorded on {stream.name}"),
            synchronize=lambda: self.log.append("host waits"),
        )


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_mark_is_in_the_stream_of_its_own_device(device: str) -> None:
    cuda = LoggedCuda()
    mark = StreamEvent(torch.device(device), cuda)
    kept: list[str] = []
    values: Any = SimpleNamespace(device=torch.device(device), record_stream=lambda stream: kept.append(stream.name))
    mark.precede(values)
    mark.wait()
    stream = f"stream of {device}"
    assert cuda.log == [f"recorded on {stream}", f"{stream} waits", "host waits"]
    assert kept == [stream]


def test_what_is_handed_over_on_the_cpu_is_the_same() -> None:
    values = torch.ones(3)
    assert hand_over(values)() is values


@pytest.mark.parametrize("stack", [False, True])
def test_what_was_sent_is_not_changed_by_what_comes_later(stack: bool) -> None:
    part = np.arange(3)
    sent = send_arrays([part, part], CPU, stack=stack)
    part[:] = 9
    assert sent.flatten().tolist() == [0, 1, 2, 0, 1, 2]


def test_rows_come_back_as_they_are_and_lie_in_one_piece() -> None:
    rows = begin_readback(torch.arange(12, dtype=torch.bfloat16).view(3, 4)[:, :2])()
    assert rows.dtype == np.float32
    assert rows.flags.c_contiguous
    assert rows.tolist() == [[0, 1], [4, 5], [8, 9]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: there is no pinned memory without one")
def test_a_gpu_gets_and_gives_what_was_sent() -> None:
    device = torch.device("cuda", 0)
    sent = [send_arrays([np.arange(first, first + 1000)], device) for first in range(20)]
    arrived = [begin_readback(one.view(1, -1)) for one in sent]
    handed = [hand_over(one) for one in sent]
    for first, (rows, taken) in enumerate(zip(arrived, handed, strict=True)):
        assert rows()[0].tolist() == taken().tolist() == list(range(first, first + 1000))
    pixels = [np.full((3, 4, 4), value, np.uint8) for value in range(5)]
    assert torch.equal(send_arrays(pixels, device, stack=True).cpu(), torch.from_numpy(np.stack(pixels)))
