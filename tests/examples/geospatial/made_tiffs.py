"""GeoTIFFs made by code, and others that no server should read."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import rasterio
from affine import Affine
from rasterio.crs import CRS
from rasterio.io import MemoryFile

from geo_segmentation.arrays import Bands

UTM = CRS.from_epsg(32632)
"""Zone of Switzerland, in metres."""
CORNER = (465_000.0, 5_240_000.0)
PIXEL = 30.0
NODATA = -9999.0

VRT = b"""<VRTDataset rasterXSize="4" rasterYSize="4"><VRTRasterBand dataType="Int16" band="1"><SimpleSource>
<SourceFilename relativeToVRT="0">/etc/hostname</SourceFilename></SimpleSource></VRTRasterBand></VRTDataset>"""


def placed(row: float = 0, column: float = 0, pixel: float = PIXEL) -> Affine:
    """North-up grid whose first pixel is that many pixels from `CORNER`."""
    return Affine(pixel, 0.0, CORNER[0] + column * pixel, 0.0, -pixel, CORNER[1] - row * pixel)


def values(height: int, width: int, *, bands: int = 6, seed: int = 0) -> Bands:
    """Reflectances times 10,000, as whole numbers: blobs of some pixels, and noise."""
    random = np.random.default_rng(seed)
    blobs = random.normal(1800, 1300, (bands, -(-height // 9), -(-width // 7))).repeat(9, 1).repeat(7, 2)
    made: Bands = np.round(blobs[:, :height, :width] + random.normal(0, 300, (bands, height, width))).astype(np.float32)
    return made.clip(-100, 12_000)


def geotiff(
    bands: Any, *, dtype: str = "int16", crs: Any = UTM, transform: Any = None, shown: Any = None, **settings: Any
) -> bytes:
    """A GeoTIFF of bands, [bands, height, width].

    Args:
        bands: Values.
        dtype: Their type.
        crs: Coordinate reference system. None: none.
        transform: Grid. None: the one at `CORNER`.
        shown: Pixels that the mask inside the file shows. None: no mask.
        settings: Of the file, such as `compress`.
    """
    count, height, width = np.shape(bands)
    profile = {"width": width, "height": height, "count": count, "dtype": dtype, "crs": crs}
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True), MemoryFile() as memory:
        with memory.open(driver="GTiff", transform=transform or placed(), **profile, **settings) as file:
            file.write(np.asarray(bands).astype(dtype))
            if shown is not None:
                file.write_mask(shown)
        written: bytes = memory.read()
        return written


def bomb(edge: int = 30_000) -> bytes:
    """Some kilobytes that unpack to six bands of `edge` x `edge` pixels."""
    with MemoryFile() as memory:
        profile = {"width": edge, "height": edge, "count": 6, "dtype": "int16", "crs": UTM, "transform": placed()}
        with memory.open(driver="GTiff", sparse_ok=True, tiled=True, blockxsize=512, blockysize=512, **profile):
            pass
        written: bytes = memory.read()
        return written


def with_a_huge_block(tiff: bytes) -> bytes:
    """Enlarge the one tile of a tiled TIFF (little-endian), in its header alone."""
    (directory,) = struct.unpack_from("<I", tiff, 4)
    (entries,) = struct.unpack_from("<H", tiff, directory)
    changed = bytearray(tiff)
    for place in range(directory + 2, directory + 2 + 12 * entries, 12):
        tag, kind, count = struct.unpack_from("<HHI", tiff, place)
        if tag in (322, 323):  # TileWidth, TileLength
            assert count == 1
            struct.pack_into("<HHII", changed, place, tag, 4, 1, 65_536)
            assert kind in (3, 4)
    return bytes(changed)
