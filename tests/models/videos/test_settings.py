"""Settings of video processors are read from the files that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from staged_pool.runtime.models.images.scale import Scale
from staged_pool.runtime.models.images.settings import ImageSettings
from staged_pool.runtime.models.images.sizes import PixelRange
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
