"""Tiles of an image, as Idefics3 sees it: resized by Pillow like its image processor, and cut as bytes.

Every step gives bytes in transformers too, so the tiles are equal to the last bit.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from staged_pool.runtime.models.images.sizes import Size, TileGrid
from staged_pool.runtime.models.images.zero_copy import rgbx_pixels
from staged_pool.runtime.payloads import Pixels


def read_tiles(image: Image.Image, rule: TileGrid) -> Pixels:
    """Cut a decoded image into tiles.

    Args:
        image: RGB.
        rule: Rule of the folder, or of a request.

    Returns:
        [tiles, 3, edge, edge] as bytes, row by row. Several tiles are followed by one of the whole image. The grid is
        that of the tiles without it.
    """
    edge = rule.tile
    size = image.height, image.width
    high, wide = rule.of(size)
    whole = _resized(_resized(image, rule.first(size), rule), (high, wide), rule)
    rows, columns = high // edge, wide // edge
    count = rows * columns
    tiles = np.empty((count + (count > 1), 3, edge, edge), np.uint8)
    cut = rgbx_pixels(whole).reshape(rows, edge, columns, edge, 4).transpose(0, 2, 4, 1, 3)[:, :, :3]
    tiles[:count].reshape(rows, columns, 3, edge, edge)[:] = cut
    if count > 1:
        tiles[count] = rgbx_pixels(_resized(whole, (edge, edge), rule)).transpose(2, 0, 1)[:3]
    return Pixels(tiles, (rows, columns))


def _resized(image: Image.Image, size: Size, rule: TileGrid) -> Image.Image:
    if (image.height, image.width) == size:  # Pillow copies the image then
        return image
    return image.resize(size[::-1], resample=Image.Resampling(rule.resample))
