"""Settings of a model folder's video processor, as transformers reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from staged_pool.runtime.models.images.settings import ImageSettings, Resample
from staged_pool.runtime.models.images.sizes import PixelRange
from staged_pool.runtime.models.specs.json_file import MOST_PIXELS, JsonFile
from staged_pool.stages.errors import ConfigError

_RESAMPLES: Final[dict[int, Resample]] = {2: "bilinear", 3: "bicubic"}
_MOST_FRAMES: Final = 2**16
"""Most frames of a video in a setting."""

_USUAL_FPS: Final = 2.0
"""Frames a second of both processors, if the folder names no other number."""
_USUAL_TOKENS: Final = (128, 768)
"""Least and most tokens: of a frame in `Qwen2VLVideoProcessor`, of all frames in `Qwen3VLVideoProcessor`."""

VideoRule: TypeAlias = Literal["qwen2", "qwen3"]
"""Rules for frames and sizes: those of `Qwen2VLVideoProcessor` or of `Qwen3VLVideoProcessor`."""

_USUAL_PATCH: Final[dict[VideoRule, int]] = {"qwen2": 14, "qwen3": 16}
_USUAL_CAP: Final[dict[VideoRule, int]] = {"qwen2": 128_000, "qwen3": 768}
"""`max_video_tokens` of both processors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSettings:
    """Settings of a video processor. Its scale is that of the folder's images."""

    rule: VideoRule
    resize: PixelRange
    """Limits of the pixels of one frame; of all frames together for `qwen3`."""
    resample: Resample
    patch_size: int
    """Edge of a patch in pixels."""
    merge_size: int
    """Patches along one edge that become one token."""
    step: int
    """Frames of one patch."""
    num_frames: int | None
    """Frames to choose from each video. None: `fps` decides."""
    fps: float
    """Frames to choose for each second."""
    min_frames: int
    max_frames: int
    max_video_tokens: int | None
    """Context length that the frames of a video share; most tokens of one frame for `qwen3`.

    None: `resize` is the only limit.
    """


def read_video_settings(folder: Path, images: ImageSettings, rule: VideoRule = "qwen2") -> VideoSettings:
    """Read the settings from the file that transformers would read.

    Args:
        folder: The model folder.
        images: Settings of its images, whose scale holds for frames too.
        rule: Rules of the model's video processor.

    Raises:
        ConfigError: A file is malformed, or the settings are not supported. The message names the field.
    """
    file = _find(folder)
    if not file.get("do_resize", bool, True):
        raise ConfigError(f"{file.name}: do_resize=false is not supported for videos")
    usual = _USUAL_PATCH[rule]
    patch, merge = file.positive("patch_size", MOST_PIXELS) or usual, file.positive("merge_size") or 2
    if (patch, merge) != (images.patch_size, images.merge_size):
        raise ConfigError(f"{file.name}: patch_size={patch} and merge_size={merge} are not those of images")
    step = file.positive("temporal_patch_size") or images.scale.repeats
    if step != images.scale.repeats:
        raise ConfigError(f"{file.name}: temporal_patch_size={step} is not that of images, {images.scale.repeats}")
    resample = _RESAMPLES.get(file.get("resample", int, 3))
    if resample is None:
        raise ConfigError(f"{file.name}: resample must be 2 (bilinear) or 3 (bicubic)")
    _check_scale(file, images)
    capped = file.get("cap_pixels_per_frame", bool, False)
    return VideoSettings(
        rule=rule,
        resize=_range(file, patch * merge, rule),
        resample=resample,
        patch_size=patch,
        merge_size=merge,
        step=step,
        num_frames=file.positive("num_frames", _MOST_FRAMES),
        fps=file.number("fps", _USUAL_FPS),
        min_frames=file.positive("min_frames", _MOST_FRAMES) or 4,
        max_frames=file.positive("max_frames", _MOST_FRAMES) or 768,
        max_video_tokens=(file.positive("max_video_tokens") or _USUAL_CAP[rule]) if capped else None,
    )


def _find(folder: Path) -> JsonFile:
    """Return the settings: an object in processor_config.json, or one of two files."""
    joint = JsonFile.read(folder / "processor_config.json", root=folder) or JsonFile.empty()
    inner: dict[str, Any] | None = joint.get("video_processor", dict, None)
    if inner is not None:
        return JsonFile(f"{joint.name}: video_processor", inner)
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        if (found := JsonFile.read(folder / name, root=folder)) is not None:
            return found
    raise ConfigError("video_preprocessor_config.json and preprocessor_config.json are missing")


def _check_scale(file: JsonFile, images: ImageSettings) -> None:
    """Reject a mean or a deviation that is not that of images: both go through one scale.

    Raises:
        ConfigError: They differ.
    """
    mean, std = file.content.get("image_mean"), file.content.get("image_std")
    if mean is None or std is None:
        return
    rescale = file.content.get("rescale_factor", 1 / 255)
    try:
        given = [(rescale / s, -m / s) for m, s in zip(mean, std, strict=True)]
        same = np.allclose(given, [*zip(images.scale.factor, images.scale.bias, strict=True)], rtol=1e-4)
    except (TypeError, ValueError, ZeroDivisionError):
        same = False
    if not same:
        raise ConfigError(f"{file.name}: image_mean={mean} and image_std={std} are not those of images")


def _range(file: JsonFile, block: int, rule: VideoRule) -> PixelRange:
    edge = 2 * _USUAL_PATCH[rule]
    least, most = (tokens * edge * edge for tokens in _USUAL_TOKENS)
    size: dict[str, Any] | None = file.get("size", dict, None)
    if size is not None:
        inner = JsonFile(f"{file.name}: size", size)
        least, most = inner.size("shortest_edge"), inner.size("longest_edge")
    if rule == "qwen3":  # its processor ignores the older names
        return PixelRange(block, least, most)
    least, most = file.positive("min_pixels") or least, file.positive("max_pixels") or most
    return PixelRange(block, least, most)
