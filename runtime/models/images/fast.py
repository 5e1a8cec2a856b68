"""The fast path: bytes stay bytes, are resized by torch, and get the model's scale on the device only.

Resizing bytes is several times quicker in torch than in Pillow or in float32, and differs by rounding: see `TOLERANCE`
in `reader.py`.
"""

from __future__ import annotations

from typing import Final

import PIL
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from staged_pool.runtime.model import Pixels
from staged_pool.runtime.models.images.raw import raw_pixels
from staged_pool.runtime.models.images.settings import ImageSettings
from staged_pool.runtime.models.images.sizes import Size
from staged_pool.runtime.models.threads import use_threads

_MAY_BEGIN_WITH_COLUMNS: Final = int(PIL.__version__.partition(".")[0]) >= 13


def read_fast(picture: Image.Image, size: Size, settings: ImageSettings) -> Pixels:
    """Prepare a decoded picture.

    Args:
        picture: RGB.
        size: What it is resized to.
        settings: Fully understood.
    """
    # Preprocess calls run beside each other. The number is the calling thread's, and that with which later threads
    # begin; those of the device set theirs before every forward.
    use_threads(1)
    raw = raw_pixels(picture)
    # [4, height, width], the channels of a pixel together, as torch's code for bytes reads them.
    pixels = torch.from_numpy(raw).permute(2, 0, 1)
    if size != (picture.height, picture.width):
        pixels = _resize(pixels, size, settings)
    pixels = pixels[:3]
    if settings.crop is not None:
        pixels = _crop(pixels, settings.crop)
    if settings.patch_size is not None:
        return _patches(pixels, settings.patch_size, settings)
    return Pixels(_copied(pixels).numpy())


def _resize(pixels: Tensor, size: Size, settings: ImageSettings) -> Tensor:
    """Resize as the installed Pillow does, rounding included.

    Along one edge and then along the other, with bytes in between: what overshoots at a hard edge is cut off there, so
    that the order can be seen. Rows come first, as in torch; from Pillow 13 on, unless the height loses more than twice
    what the width does (https://github.com/python-pillow/Pillow/pull/9549).
    """
    assert settings.resample is not None
    height, width = pixels.shape[-2:]
    batch = pixels[None]
    if _MAY_BEGIN_WITH_COLUMNS and size[0] < height and height - size[0] > 2 * (width - size[1]):
        batch = F.interpolate(batch, (size[0], width), mode=settings.resample, antialias=True)
    return F.interpolate(batch, size, mode=settings.resample, antialias=True)[0]


def _crop(pixels: Tensor, crop: Size) -> Tensor:
    """Cut the middle out; where the picture is smaller, zeros surround it, one more before it than behind it."""
    height, width = pixels.shape[-2:]
    tall, wide = crop
    if tall <= height and wide <= width:
        top, left = (height - tall) // 2, (width - wide) // 2
        return pixels[:, top : top + tall, left : left + wide]
    canvas = pixels.new_zeros(3, max(tall, height), max(wide, width))
    top, left = -((height - canvas.shape[1]) // 2), -((width - canvas.shape[2]) // 2)
    canvas[:, top : top + height, left : left + width] = pixels
    top, left = top + (height - tall) // 2, left + (width - wide) // 2
    return canvas[:, top : top + tall, left : left + wide]


def _patches(pixels: Tensor, edge: int, settings: ImageSettings) -> Pixels:
    """Cut into patches, from left to right and from top to bottom, those that are merged together."""
    merge = settings.merge_size
    high, wide = pixels.shape[1] // edge, pixels.shape[2] // edge
    blocks = pixels.permute(1, 2, 0).view(high // merge, merge, edge, wide // merge, merge, edge, 3)
    # Down and across the blocks, then inside a block, then the values of a patch.
    order = (0, 3, 1, 4, 6, 2, 5) if settings.scale.layout == "channels first" else (0, 3, 1, 4, 2, 5, 6)
    values = _copied(blocks.permute(order)).view(high * wide, 3 * edge * edge)
    return Pixels(values.numpy(), (high, wide))


def _copied(values: Tensor) -> Tensor:
    """In order, and on its own: the values must outlive the decoded picture, whose memory they may still be."""
    return values.clone(memory_format=torch.contiguous_format)
