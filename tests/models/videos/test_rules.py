"""Frames, sizes, times and patches are those of transformers' video processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from staged_pool.runtime.models.images.sizes import PixelRange
from staged_pool.runtime.models.videos.patches import cut_patches
from staged_pool.runtime.models.videos.sampling import qwen2_frames, qwen3_frames, qwen3_step_times
from staged_pool.runtime.models.videos.sizes import VolumeRange, qwen2_size, qwen3_size
from staged_pool.runtime.requests import Video
from staged_pool.stages.errors import InvalidInput, UnusableMedia
from tests.models.videos import processor_oracle as oracle

TOTALS = (2, 3, 4, 5, 7, 8, 17, 60, 61, 300, 1799, 40000)
RATES = (10.0, 23.976, 30.0, 59.94)
OPTIONS: list[dict[str, Any]] = [
    {"num_frames": 8},
    {"num_frames": 7},
    {"num_frames": 32},
    {"fps": 1.0},
    {"fps": 2.0},
    {"fps": 0.5},
    {"fps": 30.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_qwen2_frames_are_those_of_its_processor(options: dict[str, Any]) -> None:
    failed = 0
    for total in TOTALS:
        for rate in RATES:
            try:
                wanted = oracle.frames("qwen2_vl", total, rate, **options)
            except ValueError:  # it wants more frames than there are
                failed += 1
                wanted = [*range(total)]
            # Its float32 steps may end with one frame that the video does not have.
            assert qwen2_frames(total, rate, **options) == [index for index in wanted if index < total], (total, rate)
    assert failed < len(TOTALS) * len(RATES)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_qwen3_frames_and_times_are_those_of_its_processor(options: dict[str, Any]) -> None:
    for total in (1, *TOTALS):
        for rate in (None, *RATES):
            found = qwen3_frames(total, rate, **options)
            assert found == oracle.frames("qwen3_vl", total, rate, **options), (total, rate)
            assert qwen3_step_times(found, rate) == oracle.times(found, rate or 24)


def test_a_single_frame_is_chosen_alone() -> None:
    with pytest.raises(ZeroDivisionError):
        oracle.frames("qwen2_vl", 1, 30.0, fps=2.0)
    assert qwen2_frames(1, 30.0) == qwen2_frames(1, 30.0, num_frames=8) == [0]


def test_a_number_of_frames_below_a_step_is_one_step() -> None:
    assert qwen2_frames(9, 30.0, num_frames=1) == [0, 4]


@pytest.mark.parametrize(
    ("height", "width"), [(240, 320), (1080, 1920), (64, 48), (30, 700), (720, 1280), (5, 9), (28, 28), (41, 42)]
)
def test_sizes_are_those_of_the_processors(height: int, width: int) -> None:
    for least, most in ((128 * 28 * 28, 768 * 28 * 28), (4 * 28 * 28, 40 * 28 * 28)):
        found = qwen2_size(8, (height, width), PixelRange(28, least, most))
        assert found == oracle.size("qwen2_vl", 8, height, width, factor=28, least=least, most=most)
    for count in (2, 3, 7, 16, 301):
        for least, most in ((128 * 32 * 32, 768 * 32 * 32), (4 * 32 * 32, 90 * 32 * 32)):
            volume = VolumeRange(32, least, most).of(count, (height, width))
            assert volume == oracle.size("qwen3_vl", count, height, width, factor=32, least=least, most=most), (
                count,
                least,
            )


def test_frames_share_the_pixels_of_a_video_if_the_folder_caps_them() -> None:
    block = PixelRange(28, 4 * 28 * 28, 768 * 28 * 28)
    capped = qwen2_size(100, (1080, 1920), block, max_video_tokens=10_000)
    most = int(10_000 * 28 * 28 * 0.9) * 2 // 100
    assert capped == oracle.size("qwen2_vl", 100, 1080, 1920, factor=28, least=block.min_pixels, most=most)
    assert qwen2_size(2, (1080, 1920), block, max_video_tokens=10_000) == block.of((1080, 1920))


def test_a_frame_of_qwen3_has_its_share_of_the_pixels_and_a_limit_of_its_own() -> None:
    for most in (64 * 1024, 4096 * 1024):
        block = PixelRange(32, 8 * 1024, most)
        for count in (2, 5, 40):
            of_frame = max(min(20 * 1024, most // count), int(8 * 1024 * 1.05))
            found = qwen3_size(count, (1080, 1920), block, max_video_tokens=20)
            limits = {"factor": 32, "least": block.min_pixels, "most": of_frame * count}
            assert found == oracle.size("qwen3_vl", count, 1080, 1920, **limits)
            assert qwen3_size(count, (300, 400), block) == VolumeRange(32, 8 * 1024, most).of(count, (300, 400))
    assert qwen3_size(1, (300, 400), block) == qwen3_size(2, (300, 400), block)


def test_a_frame_may_not_be_too_narrow() -> None:
    with pytest.raises(UnusableMedia, match="at most 200 times"):
        qwen2_size(4, (4, 1000), PixelRange(28, 28 * 28, 40 * 28 * 28))
    with pytest.raises(UnusableMedia, match="at most 200 times"):
        VolumeRange(32, 1, 10**9).of(4, (40, 10_000))


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize(("height", "width"), [(56, 84), (48, 64), (131, 77), (84, 56)])
def test_patches_have_the_bits_of_the_processor(count: int, height: int, width: int) -> None:
    random = np.random.default_rng(count)
    frames = [random.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(count)]
    found = cut_patches(frames, count, (56, 84), step=2, patch=14, merge=2, resample="bicubic")
    wanted, grid = oracle.patches(frames, 56, 84)
    assert grid == ((count + 1) // 2, 4, 6)
    assert torch.equal(torch.from_numpy(found), wanted)


def test_frames_of_several_sizes_are_resized_one_by_one() -> None:
    random = np.random.default_rng(0)
    frames = [random.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((40, 60), (80, 100), (56, 84))]
    found = cut_patches(frames, 3, (56, 84), step=2, patch=14, merge=2, resample="bicubic")
    alone = [oracle.patches([frame], 56, 84)[0] for frame in frames]
    per_frame = 14 * 14
    first, second = (torch.from_numpy(found)[:24], torch.from_numpy(found)[24:])
    for place, step in ((0, first), (1, first)):
        got = step.view(24, 3, 2, per_frame)[:, :, place]
        assert torch.equal(got, alone[place].view(24, 3, 2, per_frame)[:, :, 0])
    assert torch.equal(second, alone[2])


@pytest.mark.parametrize("count", [0, 100_001])
def test_a_video_of_ready_frames_has_some_and_not_too_many(count: int) -> None:
    with pytest.raises(InvalidInput, match=f"A video has 1 to 100000 ready frames, not {count}"):
        Video.of_frames([b""] * count)
