"""Scale of images: the way from bytes to the normalized values of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layout = Literal["planes", "tiles", "channels first", "channels last"]
"""Layout of `Pixels.values`.

- `planes`: images, [3, height, width].
- `tiles`: several images of one size, [tiles, 3, height, width], as in Idefics3.
- `channels first`: patches, the pixels of each channel together, as in Qwen2-VL.
- `channels last`: patches, the channels of each pixel together, as in SigLIP2.
"""


@dataclass(frozen=True, slots=True)
class Scale:
    """`value * factor + bias` for each of the three channels, and the layout of the values.

    (v * rescale - mean) / std equals v * (rescale / std) - mean / std: one multiplication and one addition.
    """

    factor: tuple[float, float, float]
    bias: tuple[float, float, float]
    layout: Layout = "planes"
    repeats: int = 1
    """Frames of a patch in a model of videos. A patch of a still image has this many copies of each channel."""

    @property
    def patches(self) -> bool:
        """True if images have rows of their own: patches, or tiles."""
        return self.layout != "planes"
