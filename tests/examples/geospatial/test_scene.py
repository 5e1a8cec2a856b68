"""Scenes of several GeoTIFFs on one grid, and those that do not fit together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rasterio.crs import CRS

from geo_segmentation.geotiff import GeoTiff, read_header
from geo_segmentation.scene import Layout, lay_out, read_scene
from staged_pool import InvalidInput, TooLarge
from tests.examples.geospatial.made_tiffs import NODATA, PIXEL, geotiff, placed, values


def headers(*files: bytes) -> list[GeoTiff]:
    return [read_header(data, None, max_values=10**6, place=f"data.data[{index}]") for index, data in enumerate(files)]


def laid_out(*files: bytes) -> Layout:
    return lay_out(headers(*files), max_values=10**6)


def nothing() -> None:
    """A request that goes on."""


def test_one_file_is_its_own_scene() -> None:
    given = values(30, 40)
    tiffs = headers(geotiff(given, nodata=NODATA))
    scene = read_scene(tiffs, lay_out(tiffs, max_values=10**6), nothing)
    assert scene.grid == tiffs[0].grid
    assert np.array_equal(scene.bands, given)
    assert scene.valid.all()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_tiles_of_a_scene_are_joined_in_any_order(order: tuple[int, ...]) -> None:
    """Three tiles of four; the fourth is a gap."""
    whole = values(50, 70)
    tiles = [
        geotiff(whole[:, :30, :40], transform=placed()),
        geotiff(whole[:, :30, 40:], transform=placed(0, 40)),
        geotiff(whole[:, 30:, :40], transform=placed(30, 0)),
    ]
    tiffs = headers(*(tiles[place] for place in order))
    scene = read_scene(tiffs, lay_out(tiffs, max_values=10**6), nothing)
    has_data = np.ones((50, 70), bool)
    has_data[30:, 40:] = False
    assert (scene.grid.height, scene.grid.width) == (50, 70)
    assert scene.grid.transform.almost_equals(placed(), precision=1e-6)
    assert np.array_equal(scene.valid, has_data)
    assert np.array_equal(scene.bands, np.where(has_data, whole, 0))


def test_the_later_file_counts_where_both_have_data() -> None:
    early, late = values(20, 20, seed=1), values(20, 20, seed=2)
    late[:, 15, 5] = NODATA
    tiffs = headers(geotiff(early), geotiff(late, transform=placed(0, 10), nodata=NODATA))
    scene = read_scene(tiffs, lay_out(tiffs, max_values=10**6), nothing)
    assert np.array_equal(scene.bands[:, :, :10], early[:, :, :10])
    assert np.array_equal(scene.bands[:, :15, 10:], late[:, :15])
    assert np.array_equal(scene.bands[:, 15, 15], early[:, 15, 15])
    assert scene.valid[15, 15]


def test_a_rounding_of_coordinates_is_no_shift() -> None:
    given = values(20, 20)
    assert laid_out(geotiff(given), geotiff(given, transform=placed(20 + 1e-6, 1e-6))).corners == ((0, 0), (20, 0))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"crs": CRS.from_epsg(32633)}, "has another coordinate reference system than the first"),
        ({"transform": placed(pixel=2 * PIXEL)}, "has pixels of another size or direction"),
        ({"transform": placed(pixel=1.001 * PIXEL)}, "has pixels of another size or direction"),
        ({"transform": placed(20.5, 0)}, "is shifted by a part of a pixel"),
        ({"transform": placed(0, 20.2)}, "is shifted by a part of a pixel"),
    ],
)
def test_a_file_that_does_not_fit_is_named(other: dict[str, Any], says: str) -> None:
    given = values(20, 20)
    with pytest.raises(InvalidInput, match=rf"data.data\[1\] {says}") as raised:
        laid_out(geotiff(given), geotiff(given, **other))
    assert raised.value.param == "data.data[1]"


def test_two_small_files_far_apart_make_no_huge_scene() -> None:
    given = values(8, 8)
    with pytest.raises(TooLarge, match="makes a scene of 5008 x 5008 pixels, 150480384 values in all: at most 1000000"):
        laid_out(geotiff(given), geotiff(given, transform=placed(5000, 5000)))


def test_files_over_each_other_count_each() -> None:
    data = geotiff(values(200, 200))
    with pytest.raises(TooLarge, match="1200000 values in all"):
        laid_out(*[data] * 5)


def test_a_caller_who_leaves_stops_the_reading() -> None:
    data = geotiff(values(8, 8))
    tiffs = headers(data, data, data)
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        read_scene(tiffs, lay_out(tiffs, max_values=10**6), check)
    assert checks == 2
