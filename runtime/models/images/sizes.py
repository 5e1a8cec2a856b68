"""How large an image becomes: the rules of the image processors of transformers 5, which the fast path follows.

All sizes are (height, width).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeAlias

from staged_pool.stages.errors import UnusableMedia

Size: TypeAlias = tuple[int, int]

MAX_ASPECT: Final = 200
"""Of the longer edge to the shorter, as Qwen2-VL has it, wherever the shape of an image is kept: bringing a line of
one pixel to a model's height would make it many thousand times as large."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The shorter edge becomes so many pixels; the shape is kept, but for rounding."""

    shortest: int

    def of(self, size: Size) -> Size:
        check_aspect(size)
        short, long = sorted(size)
        longer = int(self.shortest * long / short)
        return (longer, self.shortest) if size[1] <= size[0] else (self.shortest, longer)


@dataclass(frozen=True, slots=True)
class Box:
    """So high and wide, whatever the shape was."""

    height: int
    width: int

    def of(self, size: Size) -> Size:
        return self.height, self.width


@dataclass(frozen=True, slots=True)
class PixelRange:
    """As many pixels as the image has, within bounds, with edges that are multiples of a block; the shape is kept as
    well as that allows (Qwen2-VL)."""

    block: int
    """Pixels: the edge of a patch times the patches that are merged along it."""
    min_pixels: int
    max_pixels: int

    def of(self, size: Size) -> Size:
        check_aspect(size)
        height, width = size
        high, wide = (round(edge / self.block) * self.block for edge in size)
        if high * wide > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            return self._least(height / shrink), self._least(width / shrink)
        if high * wide < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            return (
                math.ceil(height * grow / self.block) * self.block,
                math.ceil(width * grow / self.block) * self.block,
            )
        return high, wide

    def _least(self, edge: float) -> int:
        return max(self.block, math.floor(edge / self.block) * self.block)


@dataclass(frozen=True, slots=True)
class PatchBudget:
    """As many patches as fit a budget, with edges that are multiples of a patch; the shape is kept as well as that
    allows (SigLIP2 NaFlex)."""

    patch: int
    max_patches: int

    def of(self, size: Size) -> Size:
        # The scale is found by bisection to 1e-5, as transformers does: a formula would round differently.
        low, high = 1e-6, 100.0
        while high - low >= 1e-5:
            middle = (low + high) / 2
            tall, wide = self._scaled(size, middle)
            if (tall / self.patch) * (wide / self.patch) <= self.max_patches:
                low = middle
            else:
                high = middle
        return self._scaled(size, low)

    def _scaled(self, size: Size, scale: float) -> Size:
        tall, wide = (max(self.patch, math.ceil(edge * scale / self.patch) * self.patch) for edge in size)
        return tall, wide


Resize: TypeAlias = Edge | Box | PixelRange | PatchBudget


def check_aspect(size: Size) -> None:
    """Refuse a line.

    Raises:
        UnusableMedia: The image is more than `MAX_ASPECT` times as long as it is wide, or as wide as it is high.
    """
    if max(size) > MAX_ASPECT * min(size):
        raise UnusableMedia(
            f"The image is {size[1]} x {size[0]} pixels: one edge may be at most {MAX_ASPECT} times the other."
        )
