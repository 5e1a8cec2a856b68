"""A made-up scene to try the plugin with: `python -m geo_segmentation.sample scene.tif`."""

from __future__ import annotations

import sys
from typing import Final

import numpy as np
import rasterio
from affine import Affine

from geo_segmentation.arrays import Bands

HEIGHT: Final = 700
WIDTH: Final = 1000
NODATA: Final = -9999

WATER: Final = (300, 450, 320, 150, 80, 60)
FIELD: Final = (400, 750, 600, 3600, 1900, 900)
SOIL: Final = (900, 1250, 1700, 2300, 3100, 2600)
"""Reflectances times 10,000 of the six bands."""


def make_scene() -> Bands:
    """Make a river through fields, with a corner without data."""
    random = np.random.default_rng(20_260)
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    fields = random.random((HEIGHT // 50, WIDTH // 50)).repeat(50, 0).repeat(50, 1)
    land = np.where(fields[..., None] > 0.4, FIELD, SOIL) * (0.8 + 0.4 * fields[..., None])
    is_river = np.abs(rows - HEIGHT / 2 - 120 * np.sin(columns / 140)) < 30
    bands = np.where(is_river[..., None], WATER, land) * random.normal(1, 0.05, (HEIGHT, WIDTH, 1))
    bands[rows + columns < 250] = NODATA
    return np.moveaxis(bands, -1, 0).astype(np.float32)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m geo_segmentation.sample FILE")
    grid = {"crs": "EPSG:32632", "transform": Affine(30.0, 0.0, 465_000.0, 0.0, -30.0, 5_240_000.0)}
    form = {"count": 6, "dtype": "int16", "nodata": NODATA, "compress": "deflate", "predictor": 2}
    with rasterio.open(sys.argv[1], "w", driver="GTiff", width=WIDTH, height=HEIGHT, **form, **grid) as file:
        file.write(make_scene().astype(np.int16))


if __name__ == "__main__":
    main()
