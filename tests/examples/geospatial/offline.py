"""The same segmentation in a straight line: one scene, one tile after the other, and no server."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import numpy as np
import rasterio
import torch
from numpy.typing import NDArray
from PIL import Image
from rasterio.io import MemoryFile
from rasterio.merge import merge

from geo_segmentation.model import SegmentationModel, build_model
from geo_segmentation.tiles import EDGE, FARTHEST, MEANS, STDS

MARGIN = 1e-3
"""Least distance of the two best logits of a pixel that no rounding swaps."""


@cache
def model() -> SegmentationModel:
    return build_model("cpu")


@cache
def segment(*files: bytes, indices: Sequence[int] = range(6), nodata: float = -9999.0) -> tuple[Any, Any, Any]:
    """Segment the GeoTIFFs of a scene, joined by rasterio.

    Returns:
        The mask; the pixels whose class no rounding decides; and the transform of the scene.
    """
    with ExitStack() as stack:
        opened = [stack.enter_context(stack.enter_context(MemoryFile(data)).open()) for data in files]
        numbers = [index + 1 for index in indices]
        bands, transform = merge(opened, indexes=numbers, nodata=nodata, dtype="float32", method="last")
    valid = np.isfinite(bands).all(0) & (bands != nodata).all(0)
    scene = np.zeros_like(bands)
    for band, mean, std in zip(range(6), MEANS, STDS, strict=True):
        scene[band][valid] = ((bands[band][valid] - mean) / std).clip(-FARTHEST, FARTHEST)
    height, width = valid.shape
    mask = np.full((height, width), 255, np.uint8)
    is_clear = np.ones((height, width), bool)
    for top in range(0, height, EDGE):
        for left in range(0, width, EDGE):
            tile = scene[:, reflected(top, height)][:, :, reflected(left, width)]
            logits = model()(torch.from_numpy(tile)[None])[0].sort(dim=0)
            here = slice(top, min(top + EDGE, height)), slice(left, min(left + EDGE, width))
            inside = slice(0, here[0].stop - top), slice(0, here[1].stop - left)
            mask[here] = logits.indices[-1].numpy()[inside]
            is_clear[here] = (logits.values[-1] - logits.values[-2]).numpy()[inside] > MARGIN
    mask[~valid] = 255
    return mask, is_clear | ~valid, transform


def reflected(first: int, length: int) -> NDArray[np.int64]:
    """Places of a tile's lines in the scene, which is read forth and back."""
    period = max(1, 2 * (length - 1))
    places = np.arange(first, first + EDGE) % period
    return np.minimum(places, period - places)


class Answer:
    """An answer of the plugin, with its mask read twice: from the GeoTIFF by GDAL, and from the PNG by Pillow."""

    def __init__(self, data: Any) -> None:
        self.data = data
        with MemoryFile(base64.b64decode(data["data"])) as memory, memory.open() as file:
            self.mask = file.read(1)
            self.crs, self.transform, self.nodata = file.crs, file.transform, file.nodata
            self.driver = file.driver
        png = Image.open(io.BytesIO(base64.b64decode(data["png"])))
        assert (png.format, png.mode) == ("PNG", "P")
        self.png = np.asarray(png)

    def assert_is(self, *files: bytes, crs: Any, **options: Any) -> None:
        """Compare with the offline computation, pixel by pixel."""
        mask, is_clear, transform = segment(*files, **options)
        assert self.mask.shape == mask.shape == (self.data["height"], self.data["width"])
        assert is_clear.mean() > 0.99
        assert np.array_equal(self.mask[is_clear], mask[is_clear])
        assert np.array_equal(self.png, self.mask)
        assert (self.driver, self.nodata) == ("GTiff", 255)
        assert self.crs == rasterio.CRS.from_user_input(crs) == rasterio.CRS.from_user_input(self.data["crs"])
        assert self.transform.almost_equals(transform, precision=1e-6)
        assert list(self.transform)[:6] == self.data["transform"]
        values, counts = np.unique(self.mask, return_counts=True)
        assert self.data["pixels"] == {str(value): int(count) for value, count in zip(values, counts, strict=True)}
