"""Sizes of resized frames, by the rules of the video processors of transformers 5."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from staged_pool.runtime.models.images.sizes import PixelRange, Size, check_aspect

_SHARE: Final = 0.9
"""Share of `max_video_tokens` that the frames of a video get together."""
_LEAST: Final = 1.05
"""Least limit of a frame's pixels, as a multiple of `min_pixels`."""


def qwen2_size(
    frames: int, size: Size, resize: PixelRange, *, step: int = 2, max_video_tokens: int | None = None
) -> Size:
    """Return the height and width of each frame, as `Qwen2VLVideoProcessor` resizes them.

    Args:
        frames: Number of frames.
        size: Height and width of a frame.
        resize: Limits of the pixels of one frame.
        step: Frames of one step of the model in time.
        max_video_tokens: Context length that all frames share, if `cap_pixels_per_frame` is set. None: no such limit.

    Raises:
        UnusableMedia: One edge is too long for the other.
    """
    if max_video_tokens is not None:
        total = int(max_video_tokens * resize.block * resize.block * _SHARE)
        most = max(min(resize.max_pixels, total * step // frames), int(resize.min_pixels * _LEAST))
        resize = replace(resize, max_pixels=most)
    return resize.of(size)


def qwen3_size(
    frames: int, size: Size, resize: PixelRange, *, step: int = 2, max_video_tokens: int | None = None
) -> Size:
    """Return the height and width of each frame, as `Qwen3VLVideoProcessor` resizes them.

    Args:
        frames: Number of frames.
        size: Height and width of a frame.
        resize: Limits of the pixels of all frames together.
        step: Frames of one step of the model in time.
        max_video_tokens: Most tokens of one frame, if `cap_pixels_per_frame` is set. None: no such limit.

    Raises:
        UnusableMedia: One edge is too long for the other.
    """
    most = resize.max_pixels
    if max_video_tokens is not None:
        of_frame = min(max_video_tokens * resize.block * resize.block, most // frames)
        most = max(of_frame, int(resize.min_pixels * _LEAST)) * frames
    return VolumeRange(resize.block, resize.min_pixels, most, step).of(frames, size)


@dataclass(frozen=True, slots=True)
class VolumeRange:
    """Resizes frames to a number of pixels of all frames together, in whole blocks (Qwen3-VL)."""

    block: int
    """Edge of a block in pixels: the edge of a patch times the patches that are merged along it."""
    min_pixels: int
    max_pixels: int
    step: int = 2
    """Frames of one step of the model in time."""

    def of(self, frames: int, size: Size) -> Size:
        """Return the height and width of each of a number of frames. A single frame has the size of a whole step.

        Raises:
            UnusableMedia: One edge is too long for the other.
        """
        frames, (height, width) = max(frames, self.step), size
        if height < self.block or width < self.block:
            grow = max(self.block / height, self.block / width)
            height, width = int(height * grow), int(width * grow)
        check_aspect((height, width))
        high, wide = (round(edge / self.block) * self.block for edge in (height, width))
        volume = round(frames / self.step) * self.step * high * wide
        if volume > self.max_pixels:
            shrink = math.sqrt(frames * height * width / self.max_pixels)
            return self._least(height / shrink), self._least(width / shrink)
        if volume < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (frames * height * width))
            return (
                math.ceil(height * grow / self.block) * self.block,
                math.ceil(width * grow / self.block) * self.block,
            )
        return high, wide

    def _least(self, edge: float) -> int:
        return max(self.block, math.floor(edge / self.block) * self.block)
