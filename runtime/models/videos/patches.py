"""Patches of a video: frames are resized, and cut into patches that hold several frames in a row."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, repeat

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from staged_pool.runtime.models.images.settings import Resample
from staged_pool.runtime.models.images.sizes import Size
from staged_pool.runtime.models.kernels.torch_threads import use_threads
from staged_pool.runtime.threads.core_limiter import lend_core


def cut_patches(
    frames: Iterable[NDArray[np.uint8]],
    count: int,
    size: Size,
    *,
    step: int,
    patch: int,
    merge: int,
    resample: Resample,
) -> NDArray[np.uint8]:
    """Resize frames one by one, and cut them into the patches of a model.

    The last frame fills the last step.

    Args:
        frames: Frames of any sizes, [height, width, 3].
        count: Number of frames, at least one.
        size: Height and width after resizing: multiples of `patch * merge`.
        step: Frames of one patch.
        patch: Edge of a patch in pixels.
        merge: Patches along one edge that the model merges. These are adjacent in the result.
        resample: Resampling filter.

    Returns:
        [patches, values of a patch], in the order of transformers: by step, by block, and by patch in a block.
    """
    use_threads(1)  # preprocess calls run concurrently, so each gets one thread
    high, wide = size[0] // patch, size[1] // patch
    steps = -(-count // step)
    made = torch.empty((steps, high * wide, 3 * step * patch * patch), dtype=torch.uint8)
    shape = (step, 3, high // merge, merge, patch, wide // merge, merge, patch)
    blocks = (high // merge, wide // merge, merge, merge, 3, step, patch, patch)
    left = iter(frames)
    last: list[torch.Tensor] = []
    for place in range(steps):
        lend_core()
        given = [_resized(frame, size, resample) for _, frame in zip(range(step), left, strict=False)]
        last = given[-1:] or last
        full = torch.stack([*chain(given, repeat(last[0], step - len(given)))])
        made[place].view(blocks).copy_(full.view(shape).permute(2, 5, 3, 6, 1, 0, 4, 7))
    return made.flatten(0, 1).numpy()


def _resized(frame: NDArray[np.uint8], size: Size, resample: Resample) -> torch.Tensor:
    """Return a frame of a size: [3, height, width]."""
    whole = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None]
    if whole.shape[-2:] != size:
        whole = F.interpolate(whole, size, mode=resample, antialias=True)
    return whole[0].contiguous()
