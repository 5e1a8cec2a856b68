"""Pinned buffers, used in turns: that none is written while it is being read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from staged_pool.runtime.models.transfer import Staging, begin_readback, send_arrays

CPU = torch.device("cpu")
Fill = Callable[[NDArray[np.int32]], None]


class LoggedFence:
    """Says what is done with it."""

    def __init__(self, name: int, log: list[str]) -> None:
        self.name, self.log = name, log

    def record(self) -> None:
        self.log.append(f"record {self.name}")

    def synchronize(self) -> None:
        self.log.append(f"wait {self.name}")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def staging(log: list[str]) -> Staging:
    fences = iter(LoggedFence(number, log) for number in range(9))

    def allocate(size: int) -> Tensor:
        log.append(f"allocate {size}")
        return torch.full((size,), -1, dtype=torch.int32)

    return Staging(CPU, buffers=2, allocate=allocate, fence=lambda: next(fences))


def numbers(first: int) -> Fill:
    def fill(packed: NDArray[np.int32]) -> None:
        packed[:-1] = range(first, first + len(packed) - 1)

    return fill


def test_a_buffer_is_written_again_only_after_its_copy(staging: Staging, log: list[str]) -> None:
    def logged(packed: NDArray[np.int32]) -> None:
        log.append("fill")

    for _ in range(5):
        staging.send(4, logged)
    first, second = ["fill", "record 0"], ["fill", "record 1"]
    assert log == [
        *("allocate 4", *first, "allocate 4", *second),
        *("wait 0", *first, "wait 1", *second, "wait 0", *first),
    ]


def test_what_is_not_filled_is_zero_also_in_a_buffer_that_was_used(staging: Staging) -> None:
    for first in (1, 10, 20, 30):
        assert staging.send(4, numbers(first)).tolist() == [first, first + 1, first + 2, 0]
    assert staging.send(2, numbers(7)).tolist() == [7, 0]


def test_what_was_sent_is_not_changed_by_what_comes_later(staging: Staging) -> None:
    sent = [staging.send(3, numbers(first)) for first in range(6)]
    assert [one.tolist() for one in sent] == [[first, first + 1, 0] for first in range(6)]


def test_a_buffer_that_is_too_small_is_replaced_once_its_copy_has_ended(staging: Staging, log: list[str]) -> None:
    for size in (4, 4, 5, 6, 8, 9):
        staging.send(size, numbers(0))
    assert [line for line in log if not line.startswith("record")] == [
        *(
            "allocate 4",
            "allocate 4",
            "wait 0",
            "allocate 8",
            "wait 1",
            "allocate 8",
            "wait 0",
            "wait 1",
            "allocate 16",
        ),
    ]


def test_rows_come_back_as_they_are_and_lie_in_one_piece() -> None:
    rows = begin_readback(torch.arange(12, dtype=torch.bfloat16).view(3, 4)[:, :2])()
    assert rows.dtype == np.float32
    assert rows.flags.c_contiguous
    assert rows.tolist() == [[0, 1], [4, 5], [8, 9]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: there is no pinned memory without one")
def test_a_gpu_gets_and_gives_what_was_sent() -> None:
    device = torch.device("cuda", 0)
    staging = Staging(device)
    sent = [staging.send(1000, numbers(first)) for first in range(20)]
    arrived = [begin_readback(one.view(1, -1)) for one in sent]
    for first, rows in enumerate(arrived):
        assert rows()[0, :-1].tolist() == list(range(first, first + 999))
    pixels = [np.full((3, 4, 4), value, np.uint8) for value in range(5)]
    assert torch.equal(send_arrays(pixels, device, stack=True).cpu(), torch.from_numpy(np.stack(pixels)))
