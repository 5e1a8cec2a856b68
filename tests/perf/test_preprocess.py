"""Measurements of preprocess: the model's own tokenizing, and images on each path."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from perf.cost.at_once import Block, per_second
from perf.cost.preparing import PROCESSORS, Costs, Given, Images, Way, ours, processor_folders
from perf.cost.preprocess import gain
from perf.cost.tokenizing import AmongLong, Texts
from perf.tools.jpegs import jpeg
from perf.tools.servers import Options
from staged_pool.runtime.threads.openmp import VARIABLES

NOT_BEFORE_ONE_CALL = 0.0
"""Seconds: each thread ends with its first call."""


@pytest.fixture(scope="module")
def folders() -> Iterator[Mapping[str, Path]]:
    with processor_folders() as made:
        yield made


@pytest.fixture
def torch_threads() -> Iterator[int]:
    """Restore torch's number of threads."""
    threads = torch.get_num_threads()
    yield threads
    torch.set_num_threads(threads)


def test_threads_call_at_the_same_time_with_numbers_of_their_own() -> None:
    numbers, together = list[int](), threading.Barrier(3)

    def call(number: int) -> int:
        numbers.append(number)
        together.wait(60)
        return 5

    assert per_second(call, 3, NOT_BEFORE_ONE_CALL) > 0
    assert sorted(numbers) == [0, 1, 2]


def test_a_call_that_raises_ends_the_measurement() -> None:
    with pytest.raises(ZeroDivisionError):
        per_second(lambda number: 1 // number, 1, NOT_BEFORE_ONE_CALL)


def test_what_threads_gain_is_taken_round_by_round() -> None:
    assert gain([30.0, 3.0, 8.0], [20.0, 2.0, 4.0]) == pytest.approx(0.5)


@pytest.mark.parametrize("family", PROCESSORS)
def test_images_of_every_family_go_both_ways(
    family: str,
    folders: Mapping[str, Path],
    torch_threads: int,
) -> None:
    fast, exact = (ours(folders[family], way)(jpeg("vga", 0)).values for way in ("fast", "exact"))
    assert fast.shape == exact.shape
    assert (fast.itemsize, exact.itemsize) == (1, 4)


def test_of_a_model_of_videos_an_eighth_of_the_bytes_goes_to_the_device(
    folders: Mapping[str, Path],
    torch_threads: int,
) -> None:
    cost = Costs({"Qwen2-VL": folders["Qwen2-VL"]})(Given("Qwen2-VL", "vga"))
    assert cost.stock_bytes == 2 * cost.exact_bytes == 8 * cost.fast_bytes
    assert 0 < cost.decode_s < cost.exact_s


@pytest.mark.parametrize("way", ["exact", "stock"])
def test_only_the_stock_way_leaves_torch_as_it_is(
    way: Way, folders: Mapping[str, Path], torch_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "0")
    images = Images({"CLIP": folders["CLIP"]}, way)
    assert images(Block(Given("CLIP", "vga"), 2, NOT_BEFORE_ONE_CALL)) > 0
    seen = list[int]()
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [torch_threads if way == "stock" else 1]
    assert all((name in os.environ) == (way == "exact") for name in VARIABLES)


def test_texts_of_either_length_are_tokenized_and_a_short_one_among_long_ones(torch_threads: int) -> None:
    options = Options()
    texts = Texts(options)
    for length in ("short", "long"):
        assert texts(Block(length, 2, NOT_BEFORE_ONE_CALL)) > 0
    assert AmongLong(options)(Block("short", 2, 0.1))
