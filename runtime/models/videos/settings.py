"""Settings of a model folder's video processor, as transformers reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.models.images.settings import ImageSettings, Resample
from staged_pool.runtime.models.images.sizes import PixelRange
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.stages.errors import ConfigError

_RESAMPLES: Final[dict[int, Resample]] = {2: "bilinear", 3: "bicubic"}
_USUAL_FPS: Final = 2.0
"""Frames a second that Qwen2-VL was trained with, if the folder names no other number."""
_USUAL_TOKENS: Final = (128, 768)
"""Least and most tokens of a frame, in `Qwen2VLVideoProcessor` of transformers."""
_CONTEXT: Final = 128_000


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSettings:
    """Settings of a `Qwen2VLVideoProcessor`. Its scale is that of the folder's images."""

    resize: PixelRange
    """Limits of the pixels of one frame."""
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
    """Context length that the frames of a video share. None: each has the pixels of `resize`."""


def read_video_settings(folder: Path, images: ImageSettings) -> VideoSettings:
    """Read the settings from the file that transformers would read.

    Args:
        folder: The model folder.
        images: Settings of its images, whose scale holds for frames too.

    Raises:
        ConfigError: A file is malformed, or the settings are not supported. The message names the field.
    """
    file = _find(folder)
    if not file.get("do_resize", bool, True):
        raise ConfigError(f"{file.name}: do_resize=false is not supported for videos")
    patch, merge = (file.positive(field) or usual for field, usual in (("patch_size", 14), ("merge_size", 2)))
    if (patch, merge) != (images.patch_size, images.merge_size):
        raise ConfigError(f"{file.name}: patch_size={patch} and merge_size={merge} are not those of images")
    step = file.positive("temporal_patch_size") or images.scale.repeats
    if step != images.scale.repeats:
        raise ConfigError(f"{file.name}: temporal_patch_size={step} is not that of images, {images.scale.repeats}")
    resample = _RESAMPLES.get(file.get("resample", int, 3))
    if resample is None:
        raise ConfigError(f"{file.name}: resample must be 2 (bilinear) or 3 (bicubic)")
    capped = file.get("cap_pixels_per_frame", bool, False)
    return VideoSettings(
        resize=_range(file, patch * merge),
        resample=resample,
        patch_size=patch,
        merge_size=merge,
        step=step,
        num_frames=file.positive("num_frames"),
        fps=_fps(file),
        min_frames=file.positive("min_frames") or 4,
        max_frames=file.positive("max_frames") or 768,
        max_video_tokens=(file.positive("max_video_tokens") or _CONTEXT) if capped else None,
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


def _range(file: JsonFile, block: int) -> PixelRange:
    least, most = (tokens * 28 * 28 for tokens in _USUAL_TOKENS)
    size: dict[str, Any] | None = file.get("size", dict, None)
    if size is not None:
        inner = JsonFile(f"{file.name}: size", size)
        least, most = inner.size("shortest_edge"), inner.size("longest_edge")
    least, most = file.positive("min_pixels") or least, file.positive("max_pixels") or most
    return PixelRange(block, least, most)


def _fps(file: JsonFile) -> float:
    value = file.content.get("fps")
    if value is None:
        return _USUAL_FPS
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{file.name}: fps={value!r} must be a number above 0")
    return float(value)
