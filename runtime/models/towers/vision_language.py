"""The tower of a language model that inputs with images go through: its eyes, and what its texts go through, too."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from PIL import Image as Pillow

from staged_pool.runtime.model import ModelInput, Payload, Pixels, TokenSequence, Values
from staged_pool.runtime.models.checkpoint.weights import Loaded
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.kernels.transfer import Later
from staged_pool.runtime.models.tokenizing.images import MultimodalReader
from staged_pool.runtime.models.towers.text import TextTower
from staged_pool.runtime.models.towers.tower import Outcome
from staged_pool.runtime.models.vision.image_embedder import ImageEmbedder
from staged_pool.runtime.models.vision.image_layout import read_image_layout
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import ConfigError

_SAMPLE_PIXELS = (84, 56)
"""Width and height of the image that a model is tried out with."""


@dataclass(frozen=True, slots=True, eq=False)
class VisionLanguageTower:
    """See `Tower`; its payloads are token sequences with images."""

    texts: TextTower
    """What the model's other lane goes through: the same weights, which count there."""
    reader: MultimodalReader
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

    def preprocess(self, inputs: Sequence[ModelInput]) -> Sequence[Outcome]:
        return cast("Sequence[Outcome]", self.reader.read(inputs))

    def launch(self, payloads: Sequence[Payload]) -> Mapping[Output, Later[Sequence[Values]]]:
        """Pixels go to the device as they were prepared, mostly as bytes; of each output one copy comes back."""
        sequences, transformer = cast("Sequence[TokenSequence]", payloads), self.texts.transformer
        batch = transformer.pack(sequences)
        hidden = transformer.hidden(batch, self.image_embedder.embed(sequences))
        return {output: self.texts.heads[output](hidden, batch) for output in payloads[0].outputs}

    def made_up(self, sizes: Sequence[int]) -> Sequence[TokenSequence]:
        """Images with words behind them up to these sizes; those that are too small for one have just that."""
        outputs, words = frozenset(self.texts.heads), self.texts.sample_ids
        return [self.image_embedder.sample_sequence(size, words, outputs) for size in sizes]


def load_vision(loaded: Loaded, reader: ImageReader) -> ImageEmbedder:
    """What of a checkpoint looks at images.

    Args:
        loaded: The checkpoint.
        reader: Prepares images as the folder wants them.

    Raises:
        ConfigError: That is not as the weights want them.
    """
    layout = read_image_layout(loaded.base)
    if layout.merge is not None and layout.merge != reader.settings.merge_size:
        raise ConfigError(
            f"preprocessor_config.json: merge_size={reader.settings.merge_size}, "
            f"but config.json: spatial_merge_size={layout.merge}"
        )
    return ImageEmbedder(loaded.base, layout, reader.scale, _sample(reader))


def _sample(reader: ImageReader) -> Pixels:
    """An image of noise."""
    width, height = _SAMPLE_PIXELS
    noise = np.random.default_rng(0).integers(256, size=(height, width, 3), dtype=np.uint8)
    encoded = io.BytesIO()
    Pillow.fromarray(noise).save(encoded, "PNG")
    return reader.sample(encoded.getvalue())
