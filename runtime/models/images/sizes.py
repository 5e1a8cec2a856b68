"""Sizes of resized images, by the rules of the image processors of transformers 5.

All sizes are (height, width).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeAlias

import PIL

from staged_pool.stages.errors import UnusableMedia

Size: TypeAlias = tuple[int, int]

_MOST_TILED: Final = 4096
"""Longest edge of an image before it is cut into tiles, in pixels: `MAX_IMAGE_SIZE` of Idefics3 in transformers."""

MAX_ASPECT: Final = 200
"""Largest ratio of the longer edge to the shorter, as in Qwen2-VL.

It holds wherever the aspect ratio is kept. Otherwise a line one pixel high, resized to a model's height, would become
many thousand times as large."""


_MAY_BEGIN_WITH_COLUMNS: Final = int(PIL.__version__.partition(".")[0]) >= 13


@dataclass(frozen=True, slots=True)
class ShortestEdge:
    """Resizes the shorter edge to a number of pixels, and keeps the aspect ratio."""

    shortest: int

    def of(self, size: Size) -> Size:
        check_aspect(size)
        short, long = sorted(size)
        longer = int(self.shortest * long / short)
        return (longer, self.shortest) if size[1] <= size[0] else (self.shortest, longer)


@dataclass(frozen=True, slots=True)
class FixedSize:
    """Resizes to a fixed height and width."""

    height: int
    width: int

    def of(self, size: Size) -> Size:
        return self.height, self.width


@dataclass(frozen=True, slots=True)
class PixelRange:
    """Resizes to a number of pixels within limits, in whole blocks (Qwen2-VL).

    An image within the limits keeps about its size, and each keeps about its aspect ratio.
    """

    block: int
    """Edge of a block in pixels: the edge of a patch times the patches that are merged along it."""
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
    """Resizes to as many whole patches as a budget allows (SigLIP2 NaFlex).

    It keeps about the aspect ratio.
    """

    patch: int
    max_patches: int

    def of(self, size: Size) -> Size:
        # Bisection to 1e-5, like transformers: a formula would round differently.
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


@dataclass(frozen=True, slots=True)
class TileGrid:
    """Resizes to a grid of square tiles, and cuts them out (Idefics3).

    The longer edge first gets a fixed length. Then both edges grow to whole tiles. An image of several tiles is also
    seen as a whole, in one more tile.
    """

    longest: int
    """Length of the longer edge before the image is brought to whole tiles, in pixels. 0: the image keeps its size."""
    tile: int
    """Edge of a tile in pixels."""
    cuts: bool
    """Cut the image into tiles. False: it becomes one tile."""
    resample: int
    """Pillow's number of the resampling filter."""

    def first(self, size: Size) -> Size:
        """Return the size before the image is brought to whole tiles."""
        if not self.longest:
            return size
        height, width = size
        ratio = width / height
        if width >= height:
            high, wide = int(self.longest / ratio), self.longest
            high += high % 2
        else:
            high, wide = self.longest, int(self.longest * ratio)
            wide += wide % 2
        high, wide = max(high, 1), max(wide, 1)
        ratio = wide / high
        if wide >= high and wide > _MOST_TILED:
            high, wide = int(_MOST_TILED / ratio), _MOST_TILED
        elif high > wide and high > _MOST_TILED:
            high, wide = _MOST_TILED, int(_MOST_TILED * ratio)
        return max(high, 1), max(wide, 1)

    def of(self, size: Size) -> Size:
        if not self.cuts:
            return self.tile, self.tile
        height, width = self.first(size)
        ratio = width / height
        if width >= height:
            wide = self._whole(width)
            return self._whole(int(wide / ratio)), wide
        high = self._whole(height)
        return high, self._whole(int(high * ratio))

    def _whole(self, edge: int) -> int:
        return max(1, math.ceil(edge / self.tile)) * self.tile


Resize: TypeAlias = ShortestEdge | FixedSize | PixelRange | PatchBudget | TileGrid


def check_aspect(size: Size) -> None:
    """Reject an image with an extreme aspect ratio.

    Raises:
        UnusableMedia: One edge is more than `MAX_ASPECT` times the other.
    """
    if max(size) > MAX_ASPECT * min(size):
        raise UnusableMedia(
            f"The image is {size[1]} x {size[0]} pixels: one edge may be at most {MAX_ASPECT} times the other."
        )


def begins_with_columns(size: Size, target: Size) -> bool:
    """True: the installed Pillow resizes the height before the width.

    Normally the width comes first, as in torch. From Pillow 13 on, the height comes first if it shrinks by more than
    twice as many pixels as the width (https://github.com/python-pillow/Pillow/pull/9549).
    """
    height, width = size
    return _MAY_BEGIN_WITH_COLUMNS and target[0] < height and height - target[0] > 2 * (width - target[1])
