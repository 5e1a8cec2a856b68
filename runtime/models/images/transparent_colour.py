"""Transparent colour of a grey or RGB PNG, compared at the file's own bit depth.

The `tRNS` chunk (PNG, section 11.3.1.1) names one colour. Pillow compares it with samples already converted to 8 bits,
so it matches only in files of 8 bits a sample; in newer versions of Pillow, also in files of one bit.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

_DEPTHS: Final = {"1": 1, "L;2": 2, "L;4": 4, "L": 8, "RGB": 8, "I;16B": 16, "RGB;16B": 16}
"""Bits a sample, by Pillow's name of the layout. Palettes are not among them."""
_STRIP_PIXELS: Final = 2**18
"""Pixels compared at a time, in about a millisecond."""

Box: TypeAlias = tuple[int, int, int, int]
"""Left, top, right and bottom edge, in pixels."""


class TransparentColour:
    """A colour of a PNG that means full transparency.

    Args:
        values: Its samples at the file's bit depth: one of grey or three of RGB.
        data: The content of the file, of one bit or of 16 bits a sample.
    """

    def __init__(self, values: Sequence[int], data: bytes) -> None:
        self._values = values
        self._data = data
        self._needs_lower_bytes = len(values) == 3
        self._low: Image.Image | None = None

    def prepare(self) -> None:
        """Decode the lower bytes of 16-bit RGB samples, which Pillow drops: four more bytes a pixel.

        Raises:
            Exception: Any error that Pillow raises on a damaged file.
        """
        if self._needs_lower_bytes:
            self._low = _lower_bytes(self._data)

    @property
    def decodes_twice(self) -> bool:
        """True: `prepare` decodes the file a second time, into four bytes a pixel."""
        return self._needs_lower_bytes

    def paint_background(
        self, rgb: Image.Image, decoded: Image.Image, box: Box, background: tuple[int, int, int]
    ) -> None:
        """Paint the background over the pixels of a part that have this colour.

        Args:
            rgb: The part as RGB, which is changed.
            decoded: The part as Pillow decoded it: one bit or 16 bits of grey, or the upper 8 bits of RGB.
            box: Place of the part in the file.
            background: Colour of the background.
        """
        low = None if self._low is None else self._low.crop(box)
        width, height = rgb.size
        rows = max(1, _STRIP_PIXELS // width)
        for top in range(0, height, rows):
            strip = (0, top, width, min(top + rows, height))
            mask = self._mask(decoded.crop(strip), None if low is None else low.crop(strip))
            rgb.paste(background, strip, Image.fromarray(mask.astype(np.uint8) * np.uint8(255)))

    def _mask(self, decoded: Image.Image, low: Image.Image | None) -> NDArray[np.bool_]:
        if low is None:
            return np.asarray(np.asarray(decoded) == self._values[0])
        upper = np.asarray(decoded) == [value >> 8 for value in self._values]
        return np.asarray((upper & (np.asarray(low) == [value & 0xFF for value in self._values])).all(axis=-1))


def find_transparent_colour(file: PngImageFile, data: bytes) -> TransparentColour | None:
    """Read the transparent colour of a PNG before its pixels are decoded.

    Returns:
        None, if there is none, or if Pillow applies it. For samples of 2, 4 and 8 bits, Pillow's own value is
        corrected in `file.info`.
    """
    given = file.info.get("transparency")
    depth = _DEPTHS.get(str(file.tile[0].args)) if file.tile else None
    if given is None or isinstance(given, bytes) or depth is None:
        return None
    values = (given,) if isinstance(given, int) else tuple(given)
    most = 2**depth - 1  # the decoder ignores the upper bits
    if depth in (1, 16):
        del file.info["transparency"]
        return TransparentColour([value & most for value in values], data)
    # Pillow scales samples of 2 and 4 bits to a byte, but not this colour.
    spread = tuple((value & most) * (255 // most) for value in values)
    file.info["transparency"] = spread[0] if isinstance(given, int) else spread
    return None


def _lower_bytes(data: bytes) -> Image.Image:
    """Decode the lower 8 bits of an RGB PNG of 16 bits a sample: Pillow keeps the upper 8."""
    file = PngImageFile(io.BytesIO(data))
    file.tile = [tile._replace(args="RGB;16L") for tile in file.tile]
    file.load()
    return file
