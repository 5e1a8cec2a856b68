"""Tower of images: a reader, an image encoder, and the heads on its features."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import torch
from PIL import Image as Pillow

from staged_pool.runtime.models.checkpoint.weights import Loaded
from staged_pool.runtime.models.heads.image import ImageHead, ImageVector, build_image_heads
from staged_pool.runtime.models.images.open_reader import read_sample
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.kernels.misuse import MISUSE_ERRORS
from staged_pool.runtime.models.kernels.transfer import Later
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.runtime.models.tokenizing.lone_images import ImageTokens
from staged_pool.runtime.models.transformer.cuda_graphs import Recorder
from staged_pool.runtime.models.vision.image_encoder import ImageEncoder
from staged_pool.runtime.models.vision.image_graphs import COUNTS, ImageValues
from staged_pool.runtime.payloads import Payload, Pixels, PreparedImage, Values
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import ConfigError, InvalidInput
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")

_SAMPLES: Final = ((224, 224), (96, 320), (400, 150))
"""Heights and widths, in pixels, of the test images; all shapes differ."""

_STRIDE: Final = 32
"""Edge of the pixels behind one vector of the last layer, for models without patches: that of all known ones."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageTower:
    """Tower of images, see `Tower`; its payloads are images."""

    architecture: str
    encoder: ImageEncoder
    heads: Mapping[Output, ImageHead]
    max_tokens: int
    parameters: int
    tokens: ImageTokens
    samples: Sequence[Pixels]

    @property
    def outputs(self) -> tuple[Output, ...]:
        return tuple(self.heads)

    @property
    def width(self) -> int:
        dense = self.heads.get(Output.DENSE)
        return dense.width if isinstance(dense, ImageVector) else 0

    @property
    def pads(self) -> bool:
        return self.encoder.pads

    def launch(self, payloads: Sequence[Payload]) -> Mapping[Output, Later[Sequence[Values]]]:
        """Start one batch; see `Tower.launch`.

        Pixels go to the device as bytes, and are scaled there. One copy brings each output back.
        """
        images = cast("Sequence[PreparedImage]", payloads)
        features = self.encoder.encode([image.pixels for image in images])
        return {output: self.heads[output](features) for output in images[0].outputs}

    def sample_batch(self, sizes: Sequence[int]) -> Sequence[PreparedImage]:
        pixels = self.samples[0]
        count = max(1, round(sum(sizes) / self.sample_tokens))
        return [PreparedImage(pixels, frozenset(self.heads), self.sample_tokens)] * count

    @property
    def sample_tokens(self) -> int:
        """Tokens of a test image."""
        return self.tokens.of(self.samples[0])

    def record(self, recorder: Recorder[ImageValues], tokens: int) -> str | None:
        """Record forwards of images of the usual shape; see `ImageEncoder.record`.

        Args:
            recorder: See `Recorder`.
            tokens: Most tokens of a recorded forward.
        """
        counts = [count for count in COUNTS if count * self.sample_tokens <= tokens]
        return self.encoder.record(recorder, self.samples[0], counts)


def build_image_tower(name: str, folder: ModelFolder, reader: ImageReader, loaded: Loaded) -> ImageTower:
    """Build the tower that a folder describes, in the fastest form that is right.

    Args:
        name: Name of the model, for the log.
        folder: Settings read from the folder.
        reader: Prepares its images.
        loaded: Its checkpoint.

    Raises:
        ConfigError: Reader, transformer and heads do not fit each other, or cannot be run here.
    """
    assert loaded.image is not None
    encoder = ImageEncoder(loaded.whole, loaded.image, reader.scale)
    samples = [_sample(reader, *size) for size in _SAMPLES]
    _check_fit(encoder, samples[0])
    patch = _patch(encoder)
    first = ImageTokens(patch=patch).of(samples[0])
    try:
        with torch.inference_mode():
            extra = max(0, encoder.vector_count(samples[0]) - first)  # models with stages end with fewer than patches
            features = encoder.encode(samples)
        reason = encoder.check_padding(samples)
    except MISUSE_ERRORS as error:
        raise ConfigError(_misfit(encoder, samples[0], error)) from error
    if reason:
        log.debug("model.peculiar", model=name, reason=reason)
    heads = build_image_heads(folder, loaded.whole, features)
    parameters = loaded.image_parameters() + sum(head.parameters() for head in heads.values())
    if loaded.image.device.type == "cpu":
        if reason := encoder.fuse(samples):
            log.debug("model.not_fused", model=name, reason=reason)
        if reason := encoder.prepack(samples):
            log.debug("model.not_prepacked", model=name, reason=reason)
    return ImageTower(
        architecture=type(loaded.whole if folder.heads else loaded.image).__name__,
        encoder=encoder,
        heads=heads,
        max_tokens=(reader.settings.max_patches or first) + extra,
        parameters=parameters,
        tokens=ImageTokens(patch=patch, extra=extra),
        samples=samples,
    )


def _patch(encoder: ImageEncoder) -> tuple[int, int] | None:
    """Return the height and width of a patch in pixels. None: images come as patches."""
    if encoder.any_shape:
        return None
    edge = getattr(encoder.image.config, "patch_size", _STRIDE)
    tall, wide = (edge, edge) if isinstance(edge, int) else edge
    return int(tall), int(wide)


def _check_fit(encoder: ImageEncoder, pixels: Pixels) -> None:
    """Reject a folder whose image processor does not fit its model.

    Raises:
        ConfigError: One makes patches and the other takes pixels, or the reverse, or their patches differ in size.
    """
    config = encoder.image.config
    patches = pixels.grid is not None
    if patches != encoder.any_shape:
        made, wanted = ("patches", "pixels") if patches else ("pixels", "patches")
        raise ConfigError(f"the image processor makes {made}, but {type(encoder.image).__name__} takes {wanted}")
    if patches:
        values = config.num_channels * config.patch_size**2
        if pixels.values.shape[1] != values:
            raise ConfigError(
                f"the image processor makes patches of {pixels.values.shape[1]} values, and config.json has patch_size="
                f"{config.patch_size}, which is {values}"
            )


def _misfit(encoder: ImageEncoder, pixels: Pixels, error: Exception) -> str:
    """Explain why a model fails on an image: most often its configs disagree on a size."""
    name, size = type(encoder.image).__name__, getattr(encoder.image.config, "image_size", None)
    edges = pixels.values.shape[1:]
    if pixels.grid is None and isinstance(size, int) and edges != (size, size):
        return (
            f"the image processor makes images of {edges[1]} x {edges[0]} pixels, which {name} does not take: "
            f"config.json has image_size={size}"
        )
    return f"{name} fails on an image: {error}"


def _sample(reader: ImageReader, height: int, width: int) -> Pixels:
    """Make an encoded test image: a mosaic that differs for each size.

    Fine noise would give nearly the same features for all sizes.
    """
    tiles = np.random.default_rng([height, width]).integers(256, size=(7, 7, 3), dtype=np.uint8)
    file = io.BytesIO()
    Pillow.fromarray(tiles).resize((width, height), Pillow.Resampling.NEAREST).save(file, "PNG")
    try:
        return read_sample(reader, file.getvalue())
    except InvalidInput as error:
        raise ConfigError(f"an image of {width} x {height} pixels cannot be read: {error}") from error
