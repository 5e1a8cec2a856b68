"""Fast path: torch resizes bytes, and the device converts them to the model's scale.

torch resizes bytes several times faster than Pillow does, and than torch resizes float32. The results differ by
rounding: see `TOLERANCE` in `open_reader.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from staged_pool.runtime.models.images.decoded import Decoded
from staged_pool.runtime.models.images.settings import ImageSettings
from staged_pool.runtime.models.images.sizes import Size, TileGrid, begins_with_columns
from staged_pool.runtime.models.images.tiles import read_tiles
from staged_pool.runtime.models.images.zero_copy import rgbx_pixels, shared_pixels
from staged_pool.runtime.models.kernels.torch_threads import use_threads
from staged_pool.runtime.payloads import Pixels


def read_fast(image: Image.Image | Decoded, size: Size, settings: ImageSettings) -> Pixels:
    """Prepare a decoded image.

    Args:
        image: A decoded image, or RGB.
        size: Target height and width.
        settings: Settings without `unknown`.

    Raises:
        UnusableMedia: The file is damaged.
    """
    if isinstance(settings.resize, TileGrid):
        return read_tiles(image.whole() if isinstance(image, Decoded) else image, settings.resize)
    # Preprocess calls run concurrently, so each gets one thread. The number also becomes the initial one of later
    # threads, but the device's threads set theirs before every forward.
    use_threads(1)
    pixels = _resized(image if isinstance(image, Decoded) else Decoded(image), size, settings)[:3]
    if settings.crop is not None:
        pixels = _crop(pixels, settings.crop)
    if settings.patch_size is not None:
        return _patches(pixels, settings.patch_size, settings)
    return Pixels(_copied(pixels).numpy())


def _resized(image: Decoded, size: Size, settings: ImageSettings) -> Tensor:
    """Resize like the installed Pillow, rounding included: [4, height, width], channels last in memory.

    One edge is resized, rounded to bytes, and then the other. The order matters: overshoot at hard edges is clipped in
    between. Resizing along the first edge treats each row or column by itself. So an image that is not RGB yet is
    converted in strips, and its RGB never exists as a whole.
    """
    height, width = image.size
    columns = begins_with_columns(image.size, size)
    first = (size[0], width) if columns else (height, size[1])
    if image.plain is not None and (shared := shared_pixels(image.plain)) is not None:
        whole = torch.from_numpy(shared).permute(2, 0, 1)[None]
        return _interpolated(_interpolated(whole, first, settings) if columns else whole, size, settings)[0]
    made = torch.empty((*first, 4), dtype=torch.uint8).permute(2, 0, 1)
    for box in image.strips(rows=not columns):
        left, top, right, bottom = box
        raw = rgbx_pixels(image.part(box))
        strip = torch.from_numpy(raw).permute(2, 0, 1)[None]
        if columns:
            made[:, :, left:right] = _interpolated(strip, (size[0], right - left), settings)[0]
        else:
            made[:, top:bottom] = _interpolated(strip, (bottom - top, size[1]), settings)[0]
    return _interpolated(made[None], size, settings)[0]


def _interpolated(batch: Tensor, size: Size, settings: ImageSettings) -> Tensor:
    if batch.shape[-2:] == size:
        return batch
    assert settings.resample is not None
    return F.interpolate(batch, size, mode=settings.resample, antialias=True)


def _crop(pixels: Tensor, crop: Size) -> Tensor:
    """Crop the center, or pad a smaller image with zeros.

    If the padding is odd, one more row or column of zeros is on the top or left.
    """
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
    """Cut into patches in row order; patches that the model merges are adjacent."""
    merge = settings.merge_size
    high, wide = pixels.shape[1] // edge, pixels.shape[2] // edge
    blocks = pixels.permute(1, 2, 0).view(high // merge, merge, edge, wide // merge, merge, edge, 3)
    # Rows and columns of blocks, then rows and columns of patches in a block, then the values of a patch.
    order = (0, 3, 1, 4, 6, 2, 5) if settings.scale.layout == "channels first" else (0, 3, 1, 4, 2, 5, 6)
    values = _copied(blocks.permute(order)).view(high * wide, 3 * edge * edge)
    return Pixels(values.numpy(), (high, wide))


def _copied(values: Tensor) -> Tensor:
    """Return a contiguous copy: the values must outlive the decoded image, whose memory they may share."""
    return values.clone(memory_format=torch.contiguous_format)
