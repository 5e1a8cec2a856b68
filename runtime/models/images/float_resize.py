"""Image processor of DINOv3, which resizes in floating point.

transformers has this processor (`DINOv3ViTImageProcessor`) only with torchvision. It rescales bytes to 0..1, resizes
with antialiasing, and normalizes, in this order. torch alone can do that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from staged_pool.runtime.models.images.numbers import finite, three
from staged_pool.runtime.models.specs.json_file import MOST_PIXELS, JsonFile
from staged_pool.stages.errors import ConfigError

CLASSES: Final = ("DINOv3ViTImageProcessor", "DINOv3ViTImageProcessorFast")

_MODES: Final[Mapping[int, str]] = {2: "bilinear", 3: "bicubic"}
_KNOWN: Final[Mapping[str, object]] = {"do_center_crop": False, "do_pad": False, "default_to_square": True}
"""Settings of unsupported steps, and the values that turn the steps off."""


class FloatResizeProcessor:
    """Image processor with the interface of transformers. Thread-safe.

    Args:
        file: `preprocessor_config.json`.

    Raises:
        ConfigError: A setting asks for an unsupported step; names it.
    """

    do_resize: bool

    def __init__(self, file: JsonFile) -> None:
        for field, value in _KNOWN.items():
            if file.content.get(field) not in (None, value):
                raise ConfigError(f"{file.name}: {field}={file.content[field]!r} is not supported, only {value!r}")
        size = JsonFile(f"{file.name}: size", file.get("size", dict, {"height": 224, "width": 224}))
        self.do_resize = file.get("do_resize", bool, True)
        self._size = size.size("height", MOST_PIXELS), size.size("width", MOST_PIXELS)
        resample = file.get("resample", int, 2)
        if resample not in _MODES:
            raise ConfigError(f"{file.name}: resample={resample} is neither bilinear (2) nor bicubic (3)")
        self._mode = _MODES[resample]
        factor = file.content.get("rescale_factor", 1 / 255)
        self._factor = finite(factor, "rescale_factor", file.name) if file.get("do_rescale", bool, True) else 1.0
        normalize = file.get("do_normalize", bool, True)
        self._mean, self._std = (
            torch.tensor(three(file.get(field, list, usual) if normalize else plain, field, file.name)).view(3, 1, 1)
            for field, usual, plain in (
                ("image_mean", [0.485, 0.456, 0.406], [0.0, 0.0, 0.0]),
                ("image_std", [0.229, 0.224, 0.225], [1.0, 1.0, 1.0]),
            )
        )

    def __call__(self, images: Image.Image, return_tensors: str = "np") -> dict[str, Any]:
        """Return `pixel_values` of one image: [1, 3, height, width] in float32.

        Args:
            images: One RGB image.
            return_tensors: Only `np`.
        """
        pixels: Tensor = torch.from_numpy(np.array(images)).permute(2, 0, 1)[None].float() * self._factor
        if self.do_resize:
            pixels = F.interpolate(pixels, self._size, mode=self._mode, antialias=True, align_corners=False)
        return {"pixel_values": ((pixels - self._mean) / self._std).numpy()}
