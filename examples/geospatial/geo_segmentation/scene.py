"""Scene: the GeoTIFFs of one request, joined on their common grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from geo_segmentation.arrays import Bands, Flags
from geo_segmentation.faults import fault
from geo_segmentation.geotiff import GeoTiff, Grid, read_bands
from staged_pool import TooLarge

TOLERANCE: Final = 0.01
"""Largest distance from a common grid, in pixels."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Bands on one grid."""

    grid: Grid
    bands: Bands
    valid: Flags
    """Pixels that have data in all bands."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of GeoTIFFs in their scene."""

    grid: Grid
    corners: tuple[tuple[int, int], ...]
    """Row and column of the first pixel of each."""


def lay_out(tiffs: Sequence[GeoTiff], *, max_values: int) -> Layout:
    """Find the smallest grid that holds all GeoTIFFs.

    Raises:
        InvalidInput: One has another coordinate reference system or other pixels than the first, or is shifted by a
            part of a pixel.
        TooLarge: The scene, gaps included, has more than `max_values` values.
    """
    first = tiffs[0]
    corners = [_corner(first.grid, tiff) for tiff in tiffs]
    top = min(row for row, _ in corners)
    left = min(column for _, column in corners)
    height = max(row + tiff.grid.height for (row, _), tiff in zip(corners, tiffs, strict=True)) - top
    width = max(column + tiff.grid.width for (_, column), tiff in zip(corners, tiffs, strict=True)) - left
    values = max(height * width * len(first.numbers), sum(tiff.values for tiff in tiffs))
    if values > max_values:
        message = f"makes a scene of {width} x {height} pixels, {values} values in all: at most {max_values} are read"
        raise fault("data.data", message, TooLarge)
    grid = Grid(width, height, first.grid.crs, _moved(first.grid.transform, top, left))
    return Layout(grid, tuple((row - top, column - left) for row, column in corners))


def read_scene(tiffs: Sequence[GeoTiff], layout: Layout, check: Callable[[], None]) -> Scene:
    """Read all GeoTIFFs into one scene. Where they overlap, the later one counts, except where it has no data.

    Args:
        tiffs: The GeoTIFFs.
        layout: The result of `lay_out`.
        check: A function to call before each file, which raises an error to stop.

    Raises:
        UnusableMedia: A file is damaged.
    """
    shape = layout.grid.height, layout.grid.width
    bands = np.zeros((len(tiffs[0].numbers), *shape), np.float32)
    valid = np.zeros(shape, np.bool_)
    for tiff, (row, column) in zip(tiffs, layout.corners, strict=True):
        check()
        values, has_data = read_bands(tiff)
        here = slice(row, row + tiff.grid.height), slice(column, column + tiff.grid.width)
        np.copyto(bands[:, *here], values, where=has_data)
        valid[here] |= has_data
    return Scene(layout.grid, bands, valid)


def _corner(grid: Grid, tiff: GeoTiff) -> tuple[int, int]:
    """Return the row and column of the first pixel of a GeoTIFF on a grid."""
    if tiff.grid.crs != grid.crs:
        message = "has another coordinate reference system than the first GeoTIFF: all must have one"
        raise fault(tiff.place, message)
    if not _same_pixels(grid.transform, tiff.grid.transform, max(tiff.grid.width, tiff.grid.height)):
        message = "has pixels of another size or direction than the first GeoTIFF: all must be on one grid"
        raise fault(tiff.place, message)
    inverse, there = ~grid.transform, tiff.grid.transform
    column = inverse.a * there.c + inverse.b * there.f + inverse.c
    row = inverse.d * there.c + inverse.e * there.f + inverse.f
    if max(abs(row - round(row)), abs(column - round(column))) > TOLERANCE:
        message = "is shifted by a part of a pixel against the first GeoTIFF: all must be on one grid"
        raise fault(tiff.place, message)
    return round(row), round(column)


def _same_pixels(one: Any, other: Any, edge: int) -> bool:
    """Return True if two grids stay within `TOLERANCE` over an edge of this many pixels."""
    size = max(abs(part) for part in (one.a, one.b, one.d, one.e))
    pairs = ((one.a, other.a), (one.b, other.b), (one.d, other.d), (one.e, other.e))
    return all(abs(here - there) * edge <= TOLERANCE * size for here, there in pairs)


def _moved(transform: Any, row: int, column: int) -> Any:
    """Return the transform of a grid that begins at another pixel of this one."""
    x = transform.a * column + transform.b * row + transform.c
    y = transform.d * column + transform.e * row + transform.f
    return type(transform)(transform.a, transform.b, x, transform.d, transform.e, y)
