"""The one transparent colour of a grey or RGB PNG, compared at the file's own bit depth (PNG, section 11.3.1.1).

Pillow compares it with samples that it has brought to 8 bits already, so that it matches at 8 bits a sample only; in
newer versions at one bit, too.
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
"""Bits a sample, by what Pillow calls the layout; palettes have none."""
_STRIP_PIXELS: Final = 2**18
"""Pixels compared at a time: about a millisecond."""

Box: TypeAlias = tuple[int, int, int, int]
"""Left, top, right and bottom edge, in pixels."""


class TransparentColour:
    """A colour of a PNG that stands for full transparency.

    Args:
        values: Samples as the file has them, one of grey or three of RGB.
        data: The file, of one bit or of 16 bits a sample.
    """

    def __init__(self, values: Sequence[int], data: bytes) -> None:
        self._values = values
        self._data = data
        self._needs_lower_bytes = len(values) == 3
        self._low: Image.Image | None = None

    def prepare(self) -> None:
        """Decode what Pillow has left out, if it is needed: again as many bytes a pixel as of the image itself.

        Raises:
            What Pillow raises on a damaged file.
        """
        if self._needs_lower_bytes:
            self._low = _lower_bytes(self._data)

    @property
    def decodes_twice(self) -> bool:
        """The file is decoded a second time, into four bytes a pixel."""
        return self._needs_lower_bytes

    def lay(self, shown: Image.Image, decoded: Image.Image, box: Box, background: tuple[int, int, int]) -> None:
        """Paint the background wherever a part of the decoded image has this colour.

        Args:
            shown: RGB, which is painted on.
            decoded: The part as Pillow decoded it: one bit or 16 bits of grey, or the upper 8 of RGB.
            box: Where the part lies in the file.
            background: What is painted.
        """
        low = None if self._low is None else self._low.crop(box)
        width, height = shown.size
        rows = max(1, _STRIP_PIXELS // width)
        for top in range(0, height, rows):
            strip = (0, top, width, min(top + rows, height))
            mask = self._mask(decoded.crop(strip), None if low is None else low.crop(strip))
            shown.paste(background, strip, Image.fromarray(mask.astype(np.uint8) * np.uint8(255)))

    def _mask(self, decoded: Image.Image, low: Image.Image | None) -> NDArray[np.bool_]:
        if low is None:
            return np.asarray(np.asarray(decoded) == self._values[0])
        upper = np.asarray(decoded) == [value >> 8 for value in self._values]
        return np.asarray((upper & (np.asarray(low) == [value & 0xFF for value in self._values])).all(axis=-1))


def find_transparent_colour(file: PngImageFile, data: bytes) -> TransparentColour | None:
    """Read the transparent colour of a PNG before its pixels are decoded.

    Returns:
        None where there is none, or where Pillow heeds it: what it is told is mended for samples of 2, 4 and 8 bits.
    """
    given = file.info.get("transparency")
    depth = _DEPTHS.get(str(file.tile[0].args)) if file.tile else None
    if given is None or isinstance(given, bytes) or depth is None:
        return None
    values = (given,) if isinstance(given, int) else tuple(given)
    most = 2**depth - 1  # only the lower bits count
    if depth in (1, 16):
        del file.info["transparency"]
        return TransparentColour([value & most for value in values], data)
    # Pillow spreads samples of 2 and 4 bits over a byte, but not this one.
    spread = tuple((value & most) * (255 // most) for value in values)
    file.info["transparency"] = spread[0] if isinstance(given, int) else spread
    return None


def _lower_bytes(data: bytes) -> Image.Image:
    """Decode an RGB PNG of 16 bits a sample into the lower 8, of which Pillow by itself keeps the upper 8 only."""
    file = PngImageFile(io.BytesIO(data))
    file.tile = [tile._replace(args="RGB;16L") for tile in file.tile]
    file.load()
    return file
