"""Tiles: normalised bands, padded and cut for the model, and masks put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from geo_segmentation.arrays import Bands, Flags, Mask
from geo_segmentation.geotiff import NODATA

EDGE: Final = 128
"""Height and width of a tile in pixels."""

MEANS: Final = (775.0, 1081.0, 1229.0, 2497.0, 2204.0, 1611.0)
STDS: Final = (1282.0, 1270.0, 1399.0, 1368.0, 1292.0, 1155.0)
"""Means and standard deviations of the bands, in units of reflectance times 10,000."""


FARTHEST: Final = 10.0
"""Largest distance from the mean, in standard deviations. A greater one, such as a hot pixel, is cut to this."""


def normalise(bands: Bands, valid: Flags) -> None:
    """Scale bands in place to a mean of 0 and a deviation of 1. Pixels without data become 0, the mean."""
    means, stds = (np.array(values, np.float32)[:, None, None] for values in (MEANS, STDS))
    bands -= means
    bands /= stds
    np.clip(bands, -FARTHEST, FARTHEST, out=bands)
    bands *= valid


def counted(height: int, width: int) -> tuple[int, int]:
    """Return the number of rows and columns of tiles that cover a scene."""
    return -(-height // EDGE), -(-width // EDGE)


def cut(bands: Bands, check: Callable[[], None]) -> list[Bands]:
    """Cut bands into tiles, row by row. The last ones are filled with a reflection of the scene.

    Args:
        bands: Normalised bands.
        check: A function to call before each row of tiles, which raises an error to stop.

    Returns:
        Tiles of [bands, EDGE, EDGE], each with memory of its own.
    """
    _, height, width = bands.shape
    rows, columns = counted(height, width)
    padded = np.pad(bands, ((0, 0), (0, rows * EDGE - height), (0, columns * EDGE - width)), mode="reflect")
    tiles: list[Bands] = []
    for top in range(0, rows * EDGE, EDGE):
        check()
        row = padded[:, top : top + EDGE].reshape(len(bands), EDGE, columns, EDGE)
        tiles += [row[:, :, column].copy() for column in range(columns)]
    return tiles


def assemble(masks: Sequence[Mask], valid: Flags) -> Mask:
    """Put the masks of tiles together.

    Returns:
        The mask of the scene, without the filled pixels, and with `NODATA` where the scene has no data.
    """
    height, width = valid.shape
    rows, columns = counted(height, width)
    whole = np.stack(masks).reshape(rows, columns, EDGE, EDGE).swapaxes(1, 2).reshape(rows * EDGE, columns * EDGE)
    return np.where(valid, whole[:height, :width], np.uint8(NODATA))
