"""Images of a wanted size, made with Pillow, and no two equal."""

from __future__ import annotations

import base64
import io
from itertools import count
from typing import Final

import numpy as np
from PIL import Image

from staged_pool.api.bench.sizes import ImageSize

DIFFERENT: Final = 8
"""Images of a size that are drawn. Further ones are these with another number behind their end."""

_CELL: Final = 16
"""Pixels of an edge of a random cell: a JPEG then has about as many bytes as a photo of its size."""


def draw_jpeg(size: ImageSize, rng: np.random.Generator) -> bytes:
    """Draw a JPEG of random cells with some noise."""
    rows, columns = -(-size.height // _CELL) + 1, -(-size.width // _CELL) + 1
    cells = Image.fromarray(rng.integers(256, size=(rows, columns, 3), dtype=np.uint8))
    smooth = np.asarray(cells.resize((size.width, size.height), Image.Resampling.BICUBIC), np.int16)
    noise = rng.integers(-12, 13, size=smooth.shape, dtype=np.int16)
    out = io.BytesIO()
    Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=85)
    return out.getvalue()


class ImageMaker:
    """Makes data URLs of images. Each has its own bytes, so no cache of the server knows it.

    Args:
        rng: Source of randomness.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._drawn: dict[ImageSize, list[str]] = {}
        self._numbers = count(int(rng.integers(2**40)))

    def __call__(self, size: ImageSize) -> str:
        """Make the data URL of an image; the first of a size take some milliseconds each."""
        drawn = self._drawn.get(size) or self.draw(size)
        number = next(self._numbers)
        # Decoders stop at the end of the image. Base64 of whole groups of three bytes can be joined.
        return drawn[number % DIFFERENT] + base64.b64encode(number.to_bytes(9, "big")).decode()

    def draw(self, size: ImageSize) -> list[str]:
        """Draw the images of a size before a load."""
        files = [draw_jpeg(size, self._rng) for _ in range(DIFFERENT)]
        padded = [file + bytes(-len(file) % 3) for file in files]
        urls = [f"data:image/jpeg;base64,{base64.b64encode(file).decode()}" for file in padded]
        self._drawn[size] = urls
        return urls

    def size_of_bytes(self, wanted_bytes: int) -> ImageSize:
        """Return the size, 4 to 3, of a JPEG of about these bytes.

        Sizes are steps of 1.25, so that few have to be drawn.
        """
        tried = ImageSize(320, 240)
        urls = self._drawn.get(tried) or self.draw(tried)
        per_pixel = len(urls[0]) * 3 / 4 / (tried.width * tried.height)
        wanted_width = (max(wanted_bytes, 1) / per_pixel * 4 / 3) ** 0.5
        steps = round(np.log(wanted_width / tried.width) / np.log(1.25))
        width = min(max(round(tried.width * 1.25**steps), 8), 8192)
        return ImageSize(width, max(1, round(width * 3 / 4)))
