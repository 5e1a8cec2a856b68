"""Peak memory of reading one image, estimated from its header before it is decoded.

`python -m perf.image_memory` measures each figure again. `tests/models/images/test_footprint.py` checks them.
"""

from __future__ import annotations

from typing import Final

from staged_pool.runtime.models.images.decoded import STRIP_PIXELS
from staged_pool.runtime.models.images.formats import ImageFormat
from staged_pool.runtime.models.images.jpeg import JpegStructure
from staged_pool.runtime.models.images.sizes import Size, begins_with_columns

_STORED: Final = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2}
"""Bytes of a stored pixel, by Pillow's mode. All other modes have four, RGB included."""

_WEBP: Final = 18
"""Bytes a pixel of a WebP: libwebp's two canvases, its decoder's pixels, a copy of them, and Pillow's image."""

_RUN_LENGTH: Final = 2
"""Bytes a pixel beside the image, if Pillow unpacks run-length codes: an array, and a copy of it."""

_STRIP: Final = 40
"""Bytes a pixel of a strip: as stored, as RGBA, blended or compared, turned, and resized."""

_WHOLE: Final = 4
"""Bytes a pixel of an RGB image."""

_TILED: Final = 18
"""Bytes a pixel of all tiles: the image after both resizes, its array, the tiles, and a copy with the whole image."""

_PROCESSOR: Final = 10
"""Bytes an input pixel that an image processor of transformers needs: two arrays and an image."""

_PROCESSED: Final = 48
"""Bytes an output pixel of that processor: float32 of three channels, in several steps."""


def decoder_memory(format: ImageFormat, mode: str, pixels: int, jpeg: JpegStructure | None, *, twice: bool) -> int:
    """Return the bytes that decoding takes, the decoded image included.

    Args:
        format: Format of the file.
        mode: Pillow's mode of the image.
        pixels: Number of pixels of the decoded image.
        jpeg: Structure of a JPEG. If several scans make up the image, the decoder holds two bytes for each sample.
        twice: The file is decoded a second time while the first result is held.
    """
    if format == "WebP":
        return _WEBP * pixels
    stored = _STORED.get(mode, _WHOLE) + (_WHOLE if twice else 0) + (_RUN_LENGTH if format == "BMP" else 0)
    return stored * pixels + (2 * jpeg.samples if jpeg is not None and jpeg.buffered else 0)


def fast_memory(size: Size, target: Size) -> int:
    """Return the bytes that the fast path takes beside the decoded image.

    Args:
        size: Height and width of the image.
        target: Height and width after resizing.
    """
    height, width = size
    between = target[0] * width if begins_with_columns(size, target) else height * target[1]
    strip = min(height * width, max(STRIP_PIXELS, height, width))
    return _WHOLE * between + 3 * _WHOLE * target[0] * target[1] + _STRIP * strip


def tiles_memory(size: Size, target: Size) -> int:
    """Return the bytes that cutting into tiles takes beside the decoded image; see `fast_memory`."""
    return _WHOLE * size[0] * size[1] + _TILED * target[0] * target[1]


def exact_memory(size: Size, target: Size) -> int:
    """Return the bytes that the exact path takes beside the decoded image; see `fast_memory`."""
    return (_WHOLE + _PROCESSOR) * size[0] * size[1] + _PROCESSED * target[0] * target[1]
