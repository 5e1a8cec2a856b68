"""Settings of video processors are read from the files that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from staged_pool.runtime.models.images.scale import Scale
from staged_pool.runtime.models.images.settings import ImageSettings
from staged_pool.runtime.models.images.sizes import PixelRange
from staged_pool.runtime.models.videos.options import read_options
from staged_pool.runtime.models.videos.settings import VideoRule, VideoSettings, read_video_settings
from staged_pool.stages.errors import ConfigError

PUBLISHED: dict[str, Any] = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_processor_type": "Qwen2VLImageProcessor",
}
"""The preprocessor_config.json of Qwen/Qwen2-VL-2B-Instruct, without its scale."""


def read(folder: Path, rule: VideoRule = "qwen2", **files: dict[str, Any]) -> VideoSettings:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    three = (1.0, 1.0, 1.0)
    images = ImageSettings(
        folder=folder,
        processor="Qwen2VLImageProcessorPil",
        resize=None,
        resample="bicubic",
        crop=None,
        patch_size=14 if rule == "qwen2" else 16,
        merge_size=2,
        scale=Scale(three, three, "channels first", 2),
    )
    return read_video_settings(folder, images, rule)


def test_a_published_folder_has_one_file_for_images_and_videos(tmp_path: Path) -> None:
    found = read(tmp_path, preprocessor_config=PUBLISHED)
    assert found.resize == PixelRange(28, 3136, 12845056)
    assert (found.num_frames, found.fps, found.min_frames, found.max_frames) == (None, 2.0, 4, 768)
    assert found.max_video_tokens is None


def test_a_file_of_its_own_goes_before_that_of_images(tmp_path: Path) -> None:
    own = {"size": {"shortest_edge": 100_352, "longest_edge": 602_112}, "fps": 1, "cap_pixels_per_frame": True}
    found = read(tmp_path, preprocessor_config=PUBLISHED, video_preprocessor_config=own)
    assert found.resize == PixelRange(28, 100_352, 602_112)
    assert (found.fps, found.max_video_tokens) == (1.0, 128_000)
    joint = {"video_processor": {"max_frames": 16, "num_frames": 8}}
    found = read(tmp_path, processor_config=joint)
    assert found.resize == PixelRange(28, 128 * 784, 768 * 784)
    assert (found.num_frames, found.max_frames) == (8, 16)


def test_limits_of_qwen3_are_those_of_all_frames(tmp_path: Path) -> None:
    own: dict[str, Any] = {"size": {"longest_edge": 25165824, "shortest_edge": 4096}, "patch_size": 16, "fps": 2}
    found = read(tmp_path, "qwen3", preprocessor_config=PUBLISHED, video_preprocessor_config=own)
    assert (found.rule, found.resize) == ("qwen3", PixelRange(32, 4096, 25165824))
    found = read(tmp_path, "qwen3", video_preprocessor_config={"min_pixels": 1, "cap_pixels_per_frame": True})
    assert (found.resize, found.max_video_tokens) == (PixelRange(32, 128 * 1024, 768 * 1024), 768)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fps": 0}, "fps=0 must be a number above 0"),
        ({"do_resize": False}, "do_resize=false is not supported"),
        ({"patch_size": 16}, "patch_size=16 and merge_size=2 are not those of images"),
        ({"temporal_patch_size": 1}, "temporal_patch_size=1 is not that of images, 2"),
        ({"resample": 1}, "resample must be 2"),
        ({"size": {"height": 1}}, "size: shortest_edge is missing"),
        ({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}, "image_mean=.* are not those of images"),
    ],
)
def test_settings_that_are_not_supported_are_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read(tmp_path, preprocessor_config=PUBLISHED | changes)
    assert str(caught.value).startswith("preprocessor_config.json")


def test_a_folder_without_the_files_says_which_are_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"video_preprocessor_config\.json and preprocessor_config\.json are missing"):
        read(tmp_path)


TOTALS = (1, 2, 5, 8, 60, 61, 300, 1799)
RATES = (None, 10.0, 23.976, 59.94)


@pytest.mark.parametrize("rule", ["qwen2", "qwen3"])
def test_of_a_number_and_a_rate_the_one_with_fewer_frames_decides(rule: VideoRule, tmp_path: Path) -> None:
    patch = {"patch_size": 14 if rule == "qwen2" else 16}
    folder = read(tmp_path, rule, preprocessor_config=PUBLISHED | patch)

    def chosen(total: int, rate: float | None, **options: object) -> list[int]:
        return read_options(options, folder, 768).choose(total, rate)

    by_rate = 0
    for total in TOTALS:
        for rate in RATES:
            for number, fps in ((4, 2.0), (16, 1), (64, 0.5), (7, 2)):
                one, two = chosen(total, rate, num_frames=number), chosen(total, rate, fps=fps)
                by_rate += len(two) <= number
                assert chosen(total, rate, num_frames=number, fps=fps) == (two if len(two) <= number else one)
            assert chosen(total, rate, num_frames=8, fps=-1) == chosen(total, rate, num_frames=8)
            assert chosen(total, rate, num_frames=-1, fps=2) == chosen(total, rate, fps=2)
            assert chosen(total, rate, num_frames=-1, fps=-1.0) == [*range(total)]
            assert chosen(total, rate, do_sample_frames=False, fps=2) == [*range(total)]
    assert 0 < by_rate < len(TOTALS) * len(RATES) * 4
    together, alone = (read_options({"num_frames": 8, **more}, folder, 768) for more in ({"fps": 2}, {}))
    assert together.arguments != alone.arguments
