"""Copies of prepared images to the device, where bytes become normalized values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from staged_pool.runtime.models.images.scale import Scale
from staged_pool.runtime.models.kernels.transfer import send_arrays
from staged_pool.runtime.payloads import Pixels


def to_device(pixels: Sequence[Pixels], scale: Scale, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Copy prepared images to the device, and bring them to the model's scale there.

    Args:
        pixels: At least one image or video, as bytes, or as float32 at the model's scale. All have one height and
            width, unless they are patches.
        scale: Scale of the reader that prepared them.
        device: The destination.
        dtype: Data type of the result.

    Returns:
        [images or tiles, 3, height, width]; or [patches, values of a patch], one image after the other. Patches and
        values have the order of transformers.
    """
    parts = [_part(run, scale, device) for run in _runs(pixels)]
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined.to(dtype)


def _runs(pixels: Sequence[Pixels]) -> list[list[Pixels]]:
    """Group adjacent images or videos of one dtype: bytes are copied as bytes."""
    runs: list[list[Pixels]] = []
    for image in pixels:
        if runs and _kind(runs[-1][0]) == _kind(image):
            runs[-1].append(image)
        else:
            runs.append([image])
    return runs


def _kind(pixels: Pixels) -> tuple[np.dtype[Any], bool]:
    return pixels.values.dtype, pixels.step_s is None


def _part(pixels: Sequence[Pixels], scale: Scale, device: torch.device | str) -> Tensor:
    arrays = [image.values for image in pixels]
    values = send_arrays(arrays, torch.device(device), stack=not scale.patches)
    if values.dtype == torch.uint8:
        values = _scaled(values, scale, device)
    if pixels[0].step_s is not None or scale.layout != "channels first" or scale.repeats == 1:
        return values  # the patches of a video have its own frames
    rows = values.shape[0]
    return values.view(rows, 3, 1, -1).expand(-1, -1, scale.repeats, -1).reshape(rows, -1)


def _scaled(values: Tensor, scale: Scale, device: torch.device | str) -> Tensor:
    factor, bias = (_on_device(three, torch.device(device)) for three in (scale.factor, scale.bias))
    match scale.layout:
        case "planes" | "tiles":
            return torch.addcmul(bias.view(3, 1, 1), values.float(), factor.view(3, 1, 1))
        case "channels first":
            shaped = values.view(values.shape[0], 3, -1).float()
            return torch.addcmul(bias.view(3, 1), shaped, factor.view(3, 1)).flatten(1)
        case "channels last":
            shaped = values.view(values.shape[0], -1, 3).float()
            return torch.addcmul(bias, shaped, factor).flatten(1)


@cache
def _on_device(three: tuple[float, float, float], device: torch.device) -> Tensor:
    """Copy three numbers to a device, once for all batches."""
    return send_arrays([np.array(three, np.float32)], device)
