"""Plugin `geo_segmentation`: the hooks of a request, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final

import numpy as np
import pybase64
import torch
from PIL import Image

from geo_segmentation.arrays import Bands, Flags, Mask
from geo_segmentation.geotiff import NODATA, Grid, read_header, write_mask
from geo_segmentation.model import TOKENS, build_model
from geo_segmentation.request import SegmentationRequest, parse_request
from geo_segmentation.scene import lay_out, read_scene
from geo_segmentation.sources import Sources
from geo_segmentation.tiles import assemble, cut, normalise
from staged_pool import PluginContext, PluginSetup, Processor

PALETTE: Final = ((38, 70, 83), (42, 157, 143), (233, 196, 106), (231, 111, 81))
"""Colours of the classes in the PNG. Pixels without data are transparent."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A request with its files."""

    request: SegmentationRequest
    files: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """The part of a scene that the answer needs, kept in `PluginContext.state`."""

    grid: Grid
    valid: Flags


class GeoSegmentation(Processor):
    """Segments GeoTIFFs of six bands with a model of its own.

    Args:
        setup: Device and limits. `max_image_bytes` limits each file, and `max_image_pixels` the values (pixels times
            bands) of a scene.
    """

    name = "geo_segmentation"

    def __init__(self, setup: PluginSetup) -> None:
        self._max_values = setup.config.max_image_pixels
        self._sources = Sources(setup.fetch, setup.config.max_image_bytes)
        self._device = setup.device
        self._model = build_model(self._device)

    async def parse(self, data: object, context: PluginContext) -> SegmentationRequest:
        """Check the fields of a request. It is quick, and needs no thread."""
        return parse_request(data)

    async def load(self, prompt: SegmentationRequest, context: PluginContext) -> Loaded:
        """Fetch the files."""
        return Loaded(prompt, await self._sources.get(prompt))

    def preprocess(self, loaded: Loaded, context: PluginContext) -> Sequence[Bands]:
        """Read the files into one scene, and cut it into tiles."""
        request = loaded.request
        tiffs = [
            read_header(file, request.indices, max_values=self._max_values, place=request.place(index))
            for index, file in enumerate(loaded.files)
        ]
        scene = read_scene(tiffs, lay_out(tiffs, max_values=self._max_values), context.check)
        context.state = Kept(scene.grid, scene.valid)
        normalise(scene.bands, scene.valid)
        return cut(scene.bands, context.check)

    def tokens(self, item: Bands) -> int:
        """Return the patches of a tile."""
        return TOKENS

    def forward(self, batch: Sequence[Bands]) -> Sequence[Mask]:
        """Segment tiles of any requests together."""
        with torch.inference_mode():
            logits = self._model(torch.from_numpy(np.stack(batch)).to(self._device))
            return list(logits.argmax(1).to(torch.uint8).cpu().numpy())

    def postprocess(self, rows: Sequence[Mask], context: PluginContext) -> dict[str, Any]:
        """Join the masks of the tiles, and write the whole as GeoTIFF and PNG."""
        kept: Kept = context.state
        mask = assemble(rows, kept.valid)
        context.check()
        values, counts = np.unique(mask, return_counts=True)
        return {
            "data_format": "b64_json",
            "data": _base64(write_mask(mask, kept.grid)),
            "png": _base64(_png(mask)),
            "width": kept.grid.width,
            "height": kept.grid.height,
            "crs": kept.grid.crs.to_string(),
            "transform": list(kept.grid.transform)[:6],
            "pixels": {str(value): count for value, count in zip(values.tolist(), counts.tolist(), strict=True)},
        }


def _png(mask: Mask) -> bytes:
    """Write a mask as a PNG with a palette, whose indices are the classes."""
    image = Image.fromarray(mask)
    colours = PALETTE + ((0, 0, 0),) * (256 - len(PALETTE))  # all: Pillow stores fewer bits a pixel for fewer colours
    image.putpalette([channel for colour in colours for channel in colour])
    written = BytesIO()
    image.save(written, "PNG", transparency=NODATA)
    return written.getvalue()


def _base64(data: bytes) -> str:
    return pybase64.b64encode(data).decode()
