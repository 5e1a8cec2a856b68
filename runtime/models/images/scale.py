"""What is left of an image processor's work for the device: bytes become the numbers that the model was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from staged_pool.runtime.model import Pixels
from staged_pool.runtime.models.kernels.transfer import send_arrays

Layout = Literal["planes", "channels first", "channels last"]
"""How one row of `Pixels.values` lies: [3, height, width]; or a patch, each channel's pixels together, as Qwen2-VL has
them; or a patch, each pixel's channels together, as SigLIP2 has them."""


@dataclass(frozen=True, slots=True)
class Scale:
    """`value * factor + bias`, for each of the three channels, and how the values lie.

    (v * rescale - mean) / std is v * (rescale / std) - mean / std: one multiplication and one addition.
    """

    factor: tuple[float, float, float]
    bias: tuple[float, float, float]
    layout: Layout = "planes"
    repeats: int = 1
    """Times that a model of videos is shown an image: a patch holds so many copies of each channel."""

    @property
    def patches(self) -> bool:
        return self.layout != "planes"


def to_device(pixels: Sequence[Pixels], scale: Scale, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Bring prepared images to the device and to the model's scale, which takes the host no time.

    Args:
        pixels: At least one; each as bytes, or as float32 that already has the model's scale. Of one height and width,
            unless they are patches.
        scale: Of the reader that prepared them.

    Returns:
        [images, 3, height, width]; or [patches, values of one], the images one after the other, in the order in
        which transformers has patches and values.
    """
    parts = [_part(kind, scale, device) for kind in _runs(pixels)]
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    if scale.layout == "channels first" and scale.repeats > 1:
        rows = joined.shape[0]
        joined = joined.view(rows, 3, 1, -1).expand(-1, -1, scale.repeats, -1).reshape(rows, -1)
    return joined.to(dtype)


def _runs(pixels: Sequence[Pixels]) -> list[list[Pixels]]:
    """Neighbours of one dtype together: bytes travel as bytes."""
    runs: list[list[Pixels]] = []
    for one in pixels:
        if runs and runs[-1][0].values.dtype == one.values.dtype:
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def _part(pixels: Sequence[Pixels], scale: Scale, device: torch.device | str) -> Tensor:
    arrays = [one.values for one in pixels]
    values = send_arrays(arrays, torch.device(device), stack=not scale.patches)
    if values.dtype != torch.uint8:
        return values
    factor, bias = (_on_device(three, torch.device(device)) for three in (scale.factor, scale.bias))
    match scale.layout:
        case "planes":
            return torch.addcmul(bias.view(3, 1, 1), values.float(), factor.view(3, 1, 1))
        case "channels first":
            shaped = values.view(values.shape[0], 3, -1).float()
            return torch.addcmul(bias.view(3, 1), shaped, factor.view(3, 1)).flatten(1)
        case "channels last":
            shaped = values.view(values.shape[0], -1, 3).float()
            return torch.addcmul(bias, shaped, factor).flatten(1)


@cache
def _on_device(three: tuple[float, float, float], device: torch.device) -> Tensor:
    """Bring three numbers there, once for all batches."""
    return send_arrays([np.array(three, np.float32)], device)
