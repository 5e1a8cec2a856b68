"""Choice of a reader's path: our fast one, if it gives the same images as the processor of transformers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import torch
from PIL import Image as Pillow

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.memory.budget import MemoryBudget
from staged_pool.runtime.models.images.exact_processor import read_exact
from staged_pool.runtime.models.images.fast_processor import read_fast
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.images.scale import Scale
from staged_pool.runtime.models.images.settings import ImageSettings, load_processor, read_image_settings
from staged_pool.runtime.models.images.sizes import Size
from staged_pool.runtime.models.images.to_device import to_device
from staged_pool.runtime.models.kernels.torch_threads import restore_threads
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.runtime.payloads import Pixels
from staged_pool.stages.errors import ConfigError, UnusableMedia
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")

TOLERANCE: Final = 2.0
"""Largest accepted difference of a value from that of transformers, in steps of 1/255.

torch and Pillow round resized bytes differently: by one step along each edge."""

_TRIED: Final[tuple[Size, ...]] = ((480, 640), (333, 517), (61, 47), (700, 90))
"""Heights and widths of images that both paths are compared on: large, small, and odd ones."""

_PLAIN: Final[Size] = (448, 448)
"""Height and width of an image for any processor: whole patches of 14, 16, 28 and 32 pixels."""


def open_reader(settings: ImageSettings, config: EngineConfig, memory: MemoryBudget | None = None) -> ImageReader:
    """Open a reader of images, on the fast path if it is right.

    Args:
        settings: Settings of the model's folder.
        config: Limits, and the wanted path.
        memory: Budget of memory for decodes. None: no limit.

    Raises:
        ConfigError: The folder's image processor cannot be loaded, or fails on an ordinary image.
    """
    processor = None
    if not settings.custom_code or config.preprocess_place(custom_code=True) == "thread":
        processor = load_processor(settings.folder, trust_remote_code=settings.custom_code)
        _check_processor(processor, settings)
    reason = "image_path=exact" if config.image_path == "exact" else _why_not_fast(processor, settings)
    reader = ImageReader(settings, config, memory, reason=reason, processor=processor)
    if reason is not None and config.image_path == "fast":
        log.warning("images.exact", processor=settings.processor, reason=reason)
    return reader


def read_sample(reader: ImageReader, encoded: bytes) -> Pixels:
    """Prepare an image for a check of the model. The thread keeps its number of torch threads.

    Raises:
        InvalidInput: The reader rejects the image.
    """
    with restore_threads():
        return reader.read_alone(encoded)


def _check_processor(processor: Any, settings: ImageSettings) -> None:
    """Reject a processor that fails on an ordinary image."""
    try:
        read_exact(_pattern(_PLAIN), processor, settings, {})
    except UnusableMedia as error:
        raise ConfigError(
            f"preprocessor_config.json: {settings.processor} cannot prepare an image: {error.__cause__}"
        ) from error


def _why_not_fast(processor: Any, settings: ImageSettings) -> str | None:
    """Compare both paths on a few images, to find unknown steps of a processor."""
    if settings.unknown is not None:
        return settings.unknown
    with restore_threads():  # the fast path sets one thread for the calling thread, too
        return _disagreement(processor, settings)


def _disagreement(processor: Any, settings: ImageSettings) -> str | None:
    for size in _TRIED:
        image = _pattern(size)
        exact = read_exact(image, processor, settings, {})
        target = size if settings.resize is None else settings.resize.of(size)
        fast = read_fast(image, target, settings)
        if (wrong := _difference(fast, exact, settings.scale)) is not None:
            return f"it gives another result for {size[1]} x {size[0]} pixels: {wrong}"
    return None


def _pattern(size: Size) -> Pillow.Image:
    """Return an image with both smooth gradients and hard edges."""
    rows, columns = np.indices(size)
    channels = (rows * 255 // size[0], columns * 255 // size[1], (rows // 7 + columns // 5) % 2 * 255)
    return Pillow.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


def _difference(fast: Pixels, exact: Pixels, scale: Scale) -> str | None:
    if fast.grid != exact.grid or fast.values.shape != exact.values.shape:
        return f"{exact.values.shape} values instead of {fast.values.shape}"
    ours, theirs = (to_device([pixels], scale, "cpu", torch.float32) for pixels in (fast, exact))
    steps = float((ours - theirs).abs().max()) / max(map(abs, scale.factor))
    return None if steps <= TOLERANCE else f"values differ by up to {steps:.1f} of 255"


def open_images(folder: ModelFolder, config: EngineConfig, memory: MemoryBudget, undo: ExitStack) -> ImageReader | None:
    """Open the reader of a model's images, which `undo` closes. None: the model reads no images."""
    if not (folder.image_heads or folder.images):
        return None
    settings = read_image_settings(folder.body, trust_remote_code=config.trust_remote_code)
    if folder.images is not None and folder.images.pixels is not None:
        settings = settings.within(*folder.images.pixels)
    reader = open_reader(settings, config, memory)
    undo.callback(reader.close)
    return reader
