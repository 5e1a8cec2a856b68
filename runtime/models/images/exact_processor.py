"""Exact path: the image processor of transformers itself, on Pillow and numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from staged_pool.runtime.models.images.settings import ImageSettings
from staged_pool.runtime.models.images.sizes import PixelRange, TileGrid
from staged_pool.runtime.models.kernels.misuse import MISUSE_ERRORS
from staged_pool.runtime.payloads import Pixels
from staged_pool.stages.errors import UnusableMedia


def read_exact(image: Image.Image, processor: Any, settings: ImageSettings, arguments: Mapping[str, object]) -> Pixels:
    """Prepare a decoded image. Thread-safe: a processor keeps no state between calls.

    Args:
        image: RGB.
        processor: The result of `load_processor`.
        settings: Settings of the same folder.
        arguments: Further arguments of the processor.

    Raises:
        UnusableMedia: The processor rejects the image.
    """
    if isinstance(resize := settings.resize, PixelRange):  # the folder may set other limits than its processor
        size = {"shortest_edge": resize.min_pixels, "longest_edge": resize.max_pixels}
        arguments = {"size": size, **arguments}
    if isinstance(resize, TileGrid):
        arguments = {"return_row_col_info": True, **arguments}
    try:
        made = processor(images=image, return_tensors="np", **arguments)
    except (*MISUSE_ERRORS, ArithmeticError, SystemExit) as error:  # code of a model folder may call `sys.exit`
        raise UnusableMedia(
            f"The model's image processor cannot use an image of {image.width} x {image.height} pixels."
        ) from error
    values = np.asarray(made["pixel_values"], dtype=np.float32)
    if "image_grid_thw" in made:
        _, high, wide = map(int, made["image_grid_thw"][0])
        repeats = settings.scale.repeats
        if repeats > 1:  # all frames of a still image are equal: the device repeats them
            values = values.reshape(len(values), 3, repeats, -1)[:, :, 0].reshape(len(values), -1)
        return Pixels(np.ascontiguousarray(values), (high, wide))
    if "rows" in made:  # none of an image that is not cut
        high, wide = (max(1, int(np.asarray(made[name]).item())) for name in ("rows", "cols"))
        return Pixels(np.ascontiguousarray(values[0]), (high, wide))
    if "spatial_shapes" in made:
        high, wide = map(int, made["spatial_shapes"][0])
        return Pixels(np.ascontiguousarray(values[0, : high * wide]), (high, wide))
    return Pixels(np.ascontiguousarray(values[0]))
