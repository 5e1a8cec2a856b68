"""GeoTIFFs, read from bytes with limits that are checked before any pixel, and written.

GDAL opens hundreds of formats, and some of them name other files or hosts: a VRT is one. So only its driver for TIFF is
allowed here. A few hundred kilobytes can hold gigabytes of pixels: the sizes in the header are checked first.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final

import numpy as np
import rasterio
from rasterio.errors import CRSError, NotGeoreferencedWarning, RasterioError
from rasterio.io import MemoryFile

from geo_segmentation.arrays import Bands, Flags, Mask
from geo_segmentation.faults import fault
from geo_segmentation.request import BANDS
from staged_pool import TooLarge, UnusableMedia

NODATA: Final = 255
"""Value of the mask where the scene has no data."""

DTYPES: Final = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "float64")

_NO_PLACE: Final = "has no georeference: it needs a coordinate reference system and the size of its pixels"

# Such a file is rejected, with an error of our own. The warning is about the process, and a thread cannot silence it.
warnings.filterwarnings("ignore", category=NotGeoreferencedWarning)


@dataclass(frozen=True, slots=True)
class Grid:
    """Pixels of a raster on the map."""

    width: int
    height: int
    crs: Any
    """Coordinate reference system (`rasterio.crs.CRS`)."""
    transform: Any
    """Map from column and row to coordinates (`affine.Affine`)."""


@dataclass(frozen=True, slots=True)
class GeoTiff:
    """A GeoTIFF of which the header has been read and checked."""

    data: bytes
    grid: Grid
    numbers: tuple[int, ...]
    """Numbers of the bands to read, from 1."""
    place: str
    """Field of the request that names it, for errors."""

    @property
    def values(self) -> int:
        """Number of values of its bands."""
        return self.grid.width * self.grid.height * len(self.numbers)


def read_header(data: bytes, indices: Sequence[int] | None, *, max_values: int, place: str) -> GeoTiff:
    """Read and check the header of a GeoTIFF.

    Args:
        data: The file.
        indices: See `SegmentationRequest.indices`.
        max_values: Most values (pixels times bands) to read. One block of the file may have no more either.
        place: Field of the request that names the file.

    Raises:
        UnusableMedia: It is no GeoTIFF, is damaged, or has no georeference.
        TooLarge: It has more values.
        InvalidInput: It does not have the bands of the model.
    """
    if not data.startswith((b"II", b"MM")):
        raise fault(place, "is not a GeoTIFF: a TIFF begins with the bytes II or MM", UnusableMedia)
    try:
        with _opened(data) as file:
            return GeoTiff(data, _grid(file, place), _numbers(file, indices, max_values, place), place)
    except NotGeoreferencedWarning as warning:  # where the process turns warnings into errors
        raise fault(place, _NO_PLACE, UnusableMedia) from warning
    except (RasterioError, CRSError) as error:
        raise fault(place, "is not a GeoTIFF that can be opened: it is damaged or ends early", UnusableMedia) from error


def read_bands(tiff: GeoTiff) -> tuple[Bands, Flags]:
    """Read the bands, and the pixels that have data in all of them.

    A pixel has no data where a band has the nodata value of the file, is masked, or is no finite number.

    Returns:
        Values of float32, [bands, height, width], and flags, [height, width].

    Raises:
        UnusableMedia: The file is damaged, or ends early.
    """
    try:
        with _opened(tiff.data) as file:
            numbers = list(tiff.numbers)
            bands: Bands = file.read(numbers, out_dtype="float32")
            valid: Flags = (file.read_masks(numbers) != 0).all(axis=0)
    except RasterioError as error:
        raise fault(tiff.place, "has pixels that cannot be read: it is damaged or ends early", UnusableMedia) from error
    return bands, valid & np.isfinite(bands).all(axis=0)


def write_mask(mask: Mask, grid: Grid) -> bytes:
    """Write a mask as a GeoTIFF of one band, compressed by LZW."""
    settings = {"width": grid.width, "height": grid.height, "crs": grid.crs, "transform": grid.transform}
    with MemoryFile() as memory:
        with memory.open(driver="GTiff", count=1, dtype="uint8", nodata=NODATA, compress="lzw", **settings) as file:
            file.write(mask, 1)
        written: bytes = memory.read()
        return written


def _opened(data: bytes) -> AbstractContextManager[Any]:
    opened: AbstractContextManager[Any] = rasterio.open(BytesIO(data), driver="GTiff")
    return opened


def _grid(file: Any, place: str) -> Grid:
    if file.crs is None or file.transform.is_identity or file.transform.is_degenerate:
        raise fault(place, _NO_PLACE, UnusableMedia)
    return Grid(file.width, file.height, file.crs, file.transform)


def _numbers(file: Any, indices: Sequence[int] | None, max_values: int, place: str) -> tuple[int, ...]:
    wanted = range(len(BANDS)) if indices is None else indices
    if indices is None and file.count != len(BANDS):
        raise fault(
            place,
            f"has {file.count} bands, and the model reads {len(BANDS)} ({', '.join(BANDS)}): "
            "choose them with indices, or send a file of these alone",
        )
    if max(wanted) >= file.count:
        raise fault("data.indices", f"has {max(wanted)}, and {place} has {file.count} bands, which count from 0")
    for index in wanted:
        if (dtype := file.dtypes[index]) not in DTYPES:
            raise fault(place, f"has values of {dtype}: they must be of {', '.join(DTYPES)}")
    values = file.width * file.height * len(wanted)
    if values > max_values:
        message = f"is {file.width} x {file.height} pixels of {len(wanted)} bands, which are {values} values"
        raise fault(place, f"{message}: at most {max_values} are read", TooLarge)
    block = _block_values(file)
    if block > max_values:
        raise fault(place, f"has blocks of {block} values: at most {max_values} are read", TooLarge)
    return tuple(index + 1 for index in wanted)


def _block_values(file: Any) -> int:
    """Return the values of the largest block, the unit of compression."""
    is_planar = file.interleaving is not None and file.interleaving.name == "band"  # each band has blocks of its own
    pixels: int = max(height * width for height, width in file.block_shapes)
    return pixels if is_planar else pixels * int(file.count)
