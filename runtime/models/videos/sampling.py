"""Choice of frames, by the rules of the video processors of transformers 5.

All functions are pure: they return indices of frames in the order of time.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

UNKNOWN_RATE: Final = 24.0
"""Frames a second of a video whose rate is unknown, as in transformers."""


def qwen2_frames(
    total: int,
    rate: float,
    *,
    num_frames: int | None = None,
    fps: float = 2.0,
    step: int = 2,
    min_frames: int = 4,
    max_frames: int = 768,
) -> list[int]:
    """Choose frames as `Qwen2VLVideoProcessor` does, for Qwen2-VL and Qwen2.5-VL.

    Where the processor fails, the nearest number of frames that it allows is chosen: a number above the total becomes
    the total, and a single frame is chosen alone.

    Args:
        total: Frames of the video, at least one.
        rate: Its frames a second.
        num_frames: Number of frames to choose, instead of `fps`. It is rounded to whole steps.
        fps: Frames to choose for each second.
        step: Frames of one step of the model in time.
        min_frames: Fewest frames to choose by `fps`, if there are as many.
        max_frames: Most frames to choose by `fps`.
    """
    most = min(max_frames, total) // step * step
    if num_frames is not None:
        wanted = min(max(round(num_frames / step) * step, step), total)
    else:
        wanted = math.floor(min(max(total / rate * fps, min_frames), most, total) / step) * step
    import torch  # its float32 steps are rounded in another way than those of numpy

    count = max(wanted, 1)
    found: list[int] = torch.arange(0, total, total / count).int().tolist()
    return [index for index in found[:count] if index < total]


def qwen3_frames(
    total: int,
    rate: float | None,
    *,
    num_frames: int | None = None,
    fps: float = 2.0,
    min_frames: int = 4,
    max_frames: int = 768,
) -> list[int]:
    """Choose frames as `Qwen3VLVideoProcessor` does.

    Args:
        total: Frames of the video, at least one.
        rate: Its frames a second. None: unknown.
        num_frames: Number of frames to choose, instead of `fps`.
        fps: Frames to choose for each second.
        min_frames: Fewest frames to choose by `fps`, if there are as many.
        max_frames: Most frames to choose by `fps`.
    """
    if num_frames is None:
        num_frames = min(max(int(total / (rate or UNKNOWN_RATE) * fps), min_frames), max_frames, total)
    found = np.linspace(0, total - 1, num_frames).round().astype(np.int64)
    return [int(index) for index in found]


def qwen3_step_times(indices: list[int], rate: float | None, *, step: int = 2) -> list[float]:
    """Return the time of each step of Qwen3-VL in seconds: the mean of its first and its last frame.

    Args:
        indices: Chosen frames. If the last step is not full, the last frame fills it.
        rate: Frames a second of the video. None: unknown.
        step: Frames of one step of the model in time.
    """
    filled = [*indices, *indices[-1:] * (-len(indices) % step)]
    seconds = [index / (rate or UNKNOWN_RATE) for index in filled]
    return [(seconds[first] + seconds[first + step - 1]) / 2 for first in range(0, len(seconds), step)]
