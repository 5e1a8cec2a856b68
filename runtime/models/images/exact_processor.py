"""The exact path: the image processor of transformers itself, on Pillow and numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from staged_pool.runtime.model import Pixels
from staged_pool.runtime.models.images.settings import ImageSettings
from staged_pool.runtime.models.kernels.self_check import MISUSE_ERRORS
from staged_pool.stages.errors import UnusableMedia


def read_exact(image: Image.Image, processor: Any, settings: ImageSettings, arguments: Mapping[str, object]) -> Pixels:
    """Prepare a decoded image. May run in several threads at once: a processor keeps nothing between calls.

    Args:
        image: RGB.
        processor: As `load_processor` gives it.
        settings: Of the same folder.
        arguments: What the processor is called with beside the image.

    Raises:
        UnusableMedia: The processor refuses the image.
    """
    try:
        made = processor(images=image, return_tensors="np", **arguments)
    except (*MISUSE_ERRORS, ArithmeticError) as error:
        raise UnusableMedia(
            f"The model's image processor cannot use an image of {image.width} x {image.height} pixels."
        ) from error
    values = np.asarray(made["pixel_values"], dtype=np.float32)
    if "image_grid_thw" in made:
        _, high, wide = map(int, made["image_grid_thw"][0])
        repeats = settings.scale.repeats
        if repeats > 1:  # all copies of a still image are alike: the device makes them
            values = values.reshape(len(values), 3, repeats, -1)[:, :, 0].reshape(len(values), -1)
        return Pixels(np.ascontiguousarray(values), (high, wide))
    if "spatial_shapes" in made:
        high, wide = map(int, made["spatial_shapes"][0])
        return Pixels(np.ascontiguousarray(values[0, : high * wide]), (high, wide))
    return Pixels(np.ascontiguousarray(values[0]))
