"""GeoTIFFs of many kinds, read and written; and files that are rejected before their pixels are read."""

from __future__ import annotations

import io
import tracemalloc
import warnings
from collections import Counter
from random import Random
from typing import Any, Literal

import numpy as np
import pytest
import rasterio
from PIL import Image

from geo_segmentation.geotiff import GeoTiff, Grid, read_bands, read_header, write_mask
from staged_pool import InvalidInput, TooLarge, UnusableMedia
from tests.examples.geospatial.made_tiffs import (
    CORNER,
    NODATA,
    PIXEL,
    UTM,
    VRT,
    bomb,
    geotiff,
    placed,
    values,
    with_a_huge_block,
)

SCENE = values(50, 70)


def header(data: bytes, indices: tuple[int, ...] | None = None, *, max_values: int = 10**6) -> GeoTiff:
    return read_header(data, indices, max_values=max_values, place="data.data")


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "float64"])
def test_values_of_each_type_are_read(dtype: str) -> None:
    given = (SCENE.clip(0) / 100).round() if "8" in dtype else SCENE.clip(0)
    bands, valid = read_bands(header(geotiff(given, dtype=dtype)))
    assert bands.dtype == np.float32
    assert np.array_equal(bands, given)
    assert valid.all()


@pytest.mark.parametrize(
    "settings",
    [
        {"compress": "lzw", "predictor": 2},
        {"compress": "deflate", "interleave": "band"},
        {"compress": "deflate", "interleave": "pixel", "tiled": True, "blockxsize": 16, "blockysize": 32},
        {"compress": "zstd", "BIGTIFF": "YES"},
        {"ENDIANNESS": "BIG"},
    ],
    ids=str,
)
def test_layouts_and_codecs_give_the_same_values(settings: dict[str, Any]) -> None:
    bands, _ = read_bands(header(geotiff(SCENE, **settings)))
    assert np.array_equal(bands, SCENE)


def test_indices_choose_bands_in_their_order() -> None:
    many = values(20, 30, bands=13)
    bands, _ = read_bands(header(geotiff(many), (1, 2, 3, 8, 11, 12)))
    assert np.array_equal(bands, many[[1, 2, 3, 8, 11, 12]])


def test_a_pixel_has_data_where_all_chosen_bands_have() -> None:
    given = np.concatenate([SCENE, SCENE[:1]])
    given[0, 3, 4] = given[5, 7, :] = given[6, 9, 9] = NODATA
    _, valid = read_bands(header(geotiff(given, nodata=NODATA), (0, 1, 2, 3, 4, 5)))
    expected = np.ones((50, 70), bool)
    expected[3, 4] = expected[7, :] = False
    assert np.array_equal(valid, expected)


def test_numbers_that_are_not_finite_are_no_data() -> None:
    given = SCENE.copy()
    given[2, 5, 6], given[4, 8, 9] = np.nan, np.inf
    _, valid = read_bands(header(geotiff(given, dtype="float32")))
    assert list(zip(*np.nonzero(~valid), strict=True)) == [(5, 6), (8, 9)]


def test_a_mask_inside_the_file_is_heeded() -> None:
    shown = np.ones((50, 70), np.uint8)
    shown[:, 60:] = 0
    _, valid = read_bands(header(geotiff(SCENE, shown=shown == 1)))
    assert np.array_equal(valid, shown == 1)


def test_the_grid_is_that_of_the_file() -> None:
    turned = rasterio.Affine(20.0, 5.0, 465_000.0, 5.0, -20.0, 5_240_000.0)
    assert header(geotiff(SCENE)).grid == Grid(70, 50, UTM, placed())
    assert header(geotiff(SCENE, crs="EPSG:2056", transform=turned)).grid.transform == turned


def test_a_mask_is_written_with_its_georeference() -> None:
    """Read by Pillow, which knows nothing of GDAL: the tags are those of the GeoTIFF standard."""
    mask = np.arange(50 * 70, dtype=np.uint8).reshape(50, 70)
    file = Image.open(io.BytesIO(write_mask(mask, Grid(70, 50, UTM, placed()))))
    assert np.array_equal(np.asarray(file), mask)
    tags: Any = file.tag_v2  # type: ignore[attr-defined]  # those of TIFFs alone
    assert tags[33550] == (PIXEL, PIXEL, 0.0)  # ModelPixelScale
    assert tags[33922] == (0.0, 0.0, 0.0, *CORNER, 0.0)  # ModelTiepoint
    keys = np.array(tags[34735]).reshape(-1, 4)  # GeoKeyDirectory
    assert [*keys[keys[:, 0] == 3072][0]] == [3072, 0, 1, 32632]  # ProjectedCRS
    assert tags[42113] == "255"  # GDAL_NODATA


PLAIN = geotiff(SCENE, compress="deflate")


@pytest.mark.parametrize(
    ("data", "kind", "says"),
    [
        (b"", UnusableMedia, "is not a GeoTIFF: a TIFF begins with the bytes II or MM"),
        (b"\x89PNG\r\n\x1a\n" + b"0" * 100, UnusableMedia, "is not a GeoTIFF"),
        (VRT, UnusableMedia, "is not a GeoTIFF"),
        (b"II" + VRT, UnusableMedia, "is not a GeoTIFF that can be opened"),
        (b"II*\x00" + bytes(8), UnusableMedia, "damaged or ends early"),
        (PLAIN[:200], UnusableMedia, "damaged or ends early"),
        (geotiff(SCENE[:4]), InvalidInput, "has 4 bands, and the model reads 6 (blue, green, red, near infrared"),
        (geotiff(values(9, 9, bands=7)), InvalidInput, "has 7 bands, and the model reads 6"),
        (geotiff(SCENE, dtype="complex64"), InvalidInput, "has values of complex64: they must be of uint8"),
        (geotiff(SCENE, crs=None), UnusableMedia, "has no georeference"),
    ],
    ids=lambda value: value[:12].hex() if isinstance(value, bytes) else None,
)
def test_a_bad_file_is_rejected_by_its_header(data: bytes, kind: type[InvalidInput], says: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        header(data)
    assert type(raised.value) is kind
    assert raised.value.param == "data.data"
    assert says in str(raised.value)


@pytest.mark.parametrize("action", ["ignore", "error"])
def test_a_tiff_without_place_on_the_map_is_rejected(action: Literal["ignore", "error"]) -> None:
    with io.BytesIO() as file, warnings.catch_warnings():
        warnings.simplefilter(action)
        Image.fromarray(np.zeros((9, 9), np.uint8)).save(file, "TIFF")
        with pytest.raises(UnusableMedia, match="has no georeference: it needs a coordinate reference system"):
            header(file.getvalue())


def test_a_file_that_ends_in_its_pixels_is_rejected() -> None:
    tiff = header(PLAIN[: len(PLAIN) // 2])
    with pytest.raises(UnusableMedia, match="has pixels that cannot be read: it is damaged or ends early"):
        read_bands(tiff)


def test_a_band_beyond_the_last_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"data.indices has 6, and data.data has 6 bands") as raised:
        header(PLAIN, (0, 1, 2, 3, 4, 6))
    assert raised.value.param == "data.indices"


def test_a_bomb_is_rejected_without_unpacking_it() -> None:
    data = bomb()
    assert len(data) < 10**6
    tracemalloc.start()
    with pytest.raises(TooLarge, match="is 30000 x 30000 pixels of 6 bands, which are 5400000000 values: at most"):
        header(data)
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # rasterio logs bytes that are no text
def test_a_damaged_file_is_read_or_rejected_and_nothing_else() -> None:
    whole = [PLAIN, geotiff(SCENE, compress="lzw", tiled=True, blockxsize=16, blockysize=16, nodata=NODATA)]
    random = Random(7)
    outcomes: Counter[str] = Counter()
    for turn in range(300):
        data = bytearray(whole[turn % 2])
        for _ in range(random.choice((1, 2, 8))):
            data[random.randrange(600)] = random.randrange(256)
        try:
            bands, valid = read_bands(header(bytes(data)))
            assert bands.shape[1:] == valid.shape
            outcomes["read"] += 1
        except (UnusableMedia, TooLarge, InvalidInput) as error:
            outcomes[type(error).__name__] += 1
    assert outcomes["read"] > 10
    assert outcomes["UnusableMedia"] > 10


def test_a_huge_block_of_a_small_image_is_rejected() -> None:
    """A reader unpacks whole blocks, so that the size of the image alone bounds nothing."""
    data = with_a_huge_block(geotiff(SCENE, tiled=True, blockxsize=128, blockysize=128, interleave="band"))
    with pytest.raises(TooLarge, match=f"has blocks of {65_536**2} values"):
        header(data)
