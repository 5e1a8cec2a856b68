"""Decoded image, which is converted to upright RGB in parts to save memory.

A decoded pixel takes one byte for grey or a palette, and four for colours. Converting the whole image at once would add
four bytes a pixel for RGB, eight for blending, and the same again for turning it upright.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

from PIL import Image

from staged_pool.runtime.models.images.formats import ImageFormat
from staged_pool.runtime.models.images.sizes import Size
from staged_pool.runtime.models.images.transparent_colour import Box, TransparentColour
from staged_pool.stages.errors import UnusableMedia

Colour: TypeAlias = tuple[int, int, int]
WHITE: Final[Colour] = (255, 255, 255)

_BROKEN: Final = (OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, ArithmeticError, AttributeError,
                  RuntimeError, struct.error, zlib.error, Image.DecompressionBombError, Warning)  # fmt: skip
"""Errors that Pillow raises on damaged files. Warnings: the host program may turn them into errors."""

STRIP_PIXELS: Final = 2**18
"""Pixels of a strip, which has at least one row or column.

It is a megabyte of RGB in Pillow's layout, fits the cache of a core, and takes about a millisecond."""

_BLENDED_PIXELS: Final = 2**14
"""Pixels blended at a time. Pillow holds the interpreter's lock meanwhile, for a fraction of a millisecond."""

_UPRIGHT: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transposition that makes an image upright, by its orientation. 5 to 8 swap width and height."""


def damaged(format: ImageFormat | None) -> UnusableMedia:
    """Return the error for a file that cannot be decoded."""
    named = "" if format is None else f" is a {format} that"
    return UnusableMedia(f"The image{named} cannot be decoded: the file is damaged or ends early.")


@contextmanager
def calling_pillow(format: ImageFormat | None) -> Iterator[None]:
    """Convert the errors of Pillow in a block to the error for a damaged file.

    Raises:
        UnusableMedia: Pillow has failed.
    """
    try:
        yield
    except _BROKEN as error:
        raise damaged(format) from error


class Decoded:
    """A decoded image of any kind, read as upright RGB.

    Args:
        image: The image in the mode of its file.
        orientation: Orientation as in EXIF. Numbers other than 2 to 8 change nothing.
        background: Colour that transparent pixels are blended with.
        clear: Transparent colour that Pillow ignores.
        format: Format of the file.
    """

    def __init__(
        self,
        image: Image.Image,
        orientation: int = 1,
        background: Colour = WHITE,
        clear: TransparentColour | None = None,
        format: ImageFormat | None = None,
    ) -> None:
        self._image = image
        self._orientation = orientation if orientation in _UPRIGHT else 1
        self._background = background
        self._clear = clear
        self._format = format

    @property
    def size(self) -> Size:
        """Height and width in pixels, upright."""
        width, height = self._image.size
        return (width, height) if self._orientation >= 5 else (height, width)

    @property
    def plain(self) -> Image.Image | None:
        """The decoded image, if it is already upright RGB without transparency; else None."""
        changes = self._image.mode != "RGB" or self._orientation != 1 or self._clear is not None
        return None if changes or _has_alpha(self._image) else self._image

    def part(self, box: Box) -> Image.Image:
        """Convert a part to upright RGB.

        Raises:
            UnusableMedia: The file is damaged.
        """
        with calling_pillow(self._format):
            stored = self._stored(box)
            part = self._image if stored == (0, 0, *self._image.size) else self._image.crop(stored)
            rgb = _as_rgb(part, self._background)
            if self._clear is not None:
                rgb = rgb.copy() if rgb is part else rgb
                self._clear.paint_background(rgb, part, stored, self._background)
            return rgb if self._orientation == 1 else rgb.transpose(_UPRIGHT[self._orientation])

    def whole(self) -> Image.Image:
        """Convert the whole image to RGB: four more bytes a pixel, unless it is RGB already.

        Raises:
            UnusableMedia: The file is damaged.
        """
        height, width = self.size
        if (plain := self.plain) is not None:
            return plain
        if width * height <= STRIP_PIXELS:
            return self.part((0, 0, width, height))
        rgb = Image.new("RGB", (width, height))
        for box in self.strips(rows=True):
            rgb.paste(self.part(box), box)
        return rgb

    def strips(self, *, rows: bool) -> Iterator[Box]:
        """Yield boxes of about `STRIP_PIXELS`: whole rows or whole columns of the upright image."""
        height, width = self.size
        edge, other = (height, width) if rows else (width, height)
        step = max(1, STRIP_PIXELS // other)
        for start in range(0, edge, step):
            end = min(start + step, edge)
            yield (0, start, width, end) if rows else (start, 0, end, height)

    def _stored(self, box: Box) -> Box:
        """Convert a box of the upright image to one of the decoded image."""
        left, top, right, bottom = box
        width, height = self._image.size
        match self._orientation:
            case 2:
                return width - right, top, width - left, bottom
            case 3:
                return width - right, height - bottom, width - left, height - top
            case 4:
                return left, height - bottom, right, height - top
            case 5:
                return top, left, bottom, right
            case 6:
                return top, height - right, bottom, height - left
            case 7:
                return width - bottom, height - right, width - top, height - left
            case 8:
                return width - bottom, left, width - top, right
            case _:
                return box


def _has_alpha(image: Image.Image) -> bool:
    bands = image.getbands()
    return "A" in bands or "a" in bands or image.info.get("transparency") is not None


def _as_rgb(image: Image.Image, background: Colour) -> Image.Image:
    if image.mode.startswith("I;16"):
        return image.point(lambda value: value / 256, "L").convert("RGB")
    if _has_alpha(image):
        return _blended(background, image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _blended(background: Colour, image: Image.Image) -> Image.Image:
    width, height = image.size
    rows = max(1, _BLENDED_PIXELS // width)
    below = Image.new("RGBA", (width, min(rows, height)), (*background, 255))
    blended = Image.new("RGB", image.size)
    for top in range(0, height, rows):
        strip = image.crop((0, top, width, min(top + rows, height)))
        under = below if strip.size == below.size else below.crop((0, 0, *strip.size))
        blended.paste(Image.alpha_composite(under, strip).convert("RGB"), (0, top))
    return blended
