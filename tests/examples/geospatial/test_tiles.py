"""Tiles cut from a scene, and put together again."""

from __future__ import annotations

import numpy as np
import pytest

from geo_segmentation.geotiff import NODATA
from geo_segmentation.tiles import EDGE, FARTHEST, MEANS, STDS, assemble, cut, normalise
from tests.examples.geospatial.made_tiffs import values


def nothing() -> None:
    """A request that goes on."""


def test_bands_are_normalised_by_their_own_statistics() -> None:
    bands = np.stack([np.full((2, 2), mean + std, np.float32) for mean, std in zip(MEANS, STDS, strict=True)])
    bands[:, 0, 1] = 1e9
    valid = np.array([[True, True], [False, True]])
    normalise(bands, valid)
    assert np.allclose(bands, np.array([[1, FARTHEST], [0, 1]]), atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (5, 300), (EDGE, EDGE), (EDGE + 1, EDGE - 1), (300, 260)], ids=str)
def test_tiles_hold_the_scene_and_its_reflection(shape: tuple[int, int]) -> None:
    height, width = shape
    bands = values(height, width)
    tiles = cut(bands, nothing)
    columns = -(-width // EDGE)
    assert len(tiles) == -(-height // EDGE) * columns
    for place, tile in enumerate(tiles):
        top, left = place // columns * EDGE, place % columns * EDGE
        rows = [reflected(row, height) for row in range(top, top + EDGE)]
        assert np.array_equal(tile, bands[:, rows][:, :, [reflected(at, width) for at in range(left, left + EDGE)]])
        assert tile.flags.c_contiguous
        assert tile.base is None


def reflected(place: int, length: int) -> int:
    """Place in a row that goes forth and back for ever: 0 1 2 1 0 1 2."""
    if length == 1:
        return 0
    place %= 2 * (length - 1)
    return min(place, 2 * (length - 1) - place)


@pytest.mark.parametrize("shape", [(1, 1), (5, 300), (EDGE, EDGE), (300, 260)], ids=str)
def test_masks_are_put_together_where_their_tiles_were(shape: tuple[int, int]) -> None:
    bands = values(*shape, bands=1, seed=3) % 4
    valid = np.random.default_rng(4).random(shape) > 0.1
    masks = [tile[0].astype(np.uint8) for tile in cut(bands, nothing)]
    assert np.array_equal(assemble(masks, valid), np.where(valid, bands[0].astype(np.uint8), NODATA))


def test_a_caller_who_leaves_stops_the_cutting() -> None:
    rows = 0

    def check() -> None:
        nonlocal rows
        rows += 1
        if rows == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        cut(values(3 * EDGE, 10), check)
    assert rows == 2
