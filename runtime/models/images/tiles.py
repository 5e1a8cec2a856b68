"""Tiles of an image, as Idefics3 sees it: resized by Pillow like its image processor, and cut as bytes.

Every step gives bytes in transformers too, so the tiles are equal to the last bit.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from staged_pool.runtime.model import Pixels
from staged_pool.runtime.models.images.sizes import Size, TileGrid


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
    cut = np.asarray(whole).reshape(rows, edge, columns, edge, 3).transpose(0, 2, 4, 1, 3)
    tiles = cut.reshape(rows * columns, 3, edge, edge)
    if len(tiles) > 1:
        seen = np.asarray(_resized(whole, (edge, edge), rule)).transpose(2, 0, 1)
        tiles = np.concatenate([tiles, seen[None]])
    return Pixels(np.array(tiles, order="C"), (rows, columns))  # a copy: `whole` may share the decoder's memory


def _resized(image: Image.Image, size: Size, rule: TileGrid) -> Image.Image:
    if (image.height, image.width) == size:  # Pillow copies the image then
        return image
    return image.resize(size[::-1], resample=Image.Resampling(rule.resample))
