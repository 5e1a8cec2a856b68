"""Tower of inputs with images of a vision language model."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from PIL import Image as Pillow

from staged_pool.runtime.models.checkpoint.weights import Loaded
from staged_pool.runtime.models.images.open_reader import read_sample
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.kernels.transfer import Later
from staged_pool.runtime.models.towers.text import TextTower
from staged_pool.runtime.models.vision.image_embedder import ImageEmbedder
from staged_pool.runtime.models.vision.image_layout import read_image_layout
from staged_pool.runtime.payloads import Payload, Pixels, TokenSequence, Values
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import ConfigError

_SAMPLE_PIXELS = (84, 56)
"""Width and height, in pixels, of the test image."""


@dataclass(frozen=True, slots=True, eq=False)
class VisionLanguageTower:
    """Tower of inputs with images, see `Tower`; its payloads are token sequences with images."""

    texts: TextTower
    """Tower of the other lane. It has the language model and the heads, and counts their weights."""
    image_embedder: ImageEmbedder

    @property
    def architecture(self) -> str:
        return self.texts.architecture

    @property
    def outputs(self) -> tuple[Output, ...]:
        return self.texts.outputs

    @property
    def width(self) -> int:
        return self.texts.width

    @property
    def max_tokens(self) -> int:
        return self.texts.max_tokens

    @property
    def parameters(self) -> int:
        return self.image_embedder.parameters

    @property
    def pads(self) -> bool:
        return self.texts.pads

    def launch(self, payloads: Sequence[Payload]) -> Mapping[Output, Later[Sequence[Values]]]:
        """Start one batch; see `Tower.launch`.

        Pixels go to the device as they were prepared, mostly as bytes. One copy brings each output back.
        """
        sequences, transformer = cast("Sequence[TokenSequence]", payloads), self.texts.transformer
        batch = transformer.pack(sequences)
        hidden = transformer.hidden(batch, self.image_embedder.embed(sequences))
        return {output: self.texts.heads[output](hidden, batch) for output in payloads[0].outputs}

    def sample_batch(self, sizes: Sequence[int]) -> Sequence[TokenSequence]:
        """Make test inputs: an image, then words up to the size. A small size has just the image."""
        outputs, words = frozenset(self.texts.heads), self.texts.sample_ids
        return [self.image_embedder.sample_sequence(size, words, outputs) for size in sizes]


def load_vision(loaded: Loaded, reader: ImageReader) -> ImageEmbedder:
    """Return the image embedder of a checkpoint.

    Args:
        loaded: The checkpoint.
        reader: Prepares images by the settings of the folder.

    Raises:
        ConfigError: These settings do not fit the weights.
    """
    layout = read_image_layout(loaded.base.config, loaded.base.get_input_embeddings().weight.shape[0])
    if layout.merge is not None and layout.merge != reader.settings.merge_size:
        raise ConfigError(
            f"preprocessor_config.json: merge_size={reader.settings.merge_size}, "
            f"but config.json: spatial_merge_size={layout.merge}"
        )
    sample = _sample(reader)
    if layout.tiled:
        edge, made = loaded.base.config.vision_config.image_size, sample.values.shape
        if len(made) != 4 or made[2:] != (edge, edge):
            raise ConfigError(
                f"preprocessor_config.json: {reader.settings.processor} makes values of the shape {[*made]}, but "
                f"config.json asks for tiles of {edge} x {edge} pixels (max_image_size)"
            )
    return ImageEmbedder(loaded.base, layout, reader.scale, sample)


def _sample(reader: ImageReader) -> Pixels:
    """Make an encoded test image of noise."""
    width, height = _SAMPLE_PIXELS
    noise = np.random.default_rng(0).integers(256, size=(height, width, 3), dtype=np.uint8)
    encoded = io.BytesIO()
    Pillow.fromarray(noise).save(encoded, "PNG")
    return read_sample(reader, encoded.getvalue())
