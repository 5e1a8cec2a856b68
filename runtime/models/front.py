"""The front of a model: its card and the preparation of its inputs, without weights.

An engine whose weights are in another process prepares its inputs with a front. Two things import torch nevertheless:
the fast path of images, with the first image, since torch resizes them; and the exact path, when the front is loaded,
since transformers imports torch with any image processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.memory.budget import MemoryBudget
from staged_pool.runtime.model import Lane, ModelCard, ModelInput, Preprocessed
from staged_pool.runtime.models.find import FoundModel
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.images.settings import load_processor
from staged_pool.runtime.models.preparation import ImagePreparation, Preparation, TextPreparation
from staged_pool.runtime.models.tokenizing.images import MultimodalReader
from staged_pool.runtime.models.tokenizing.lone_images import LoneImageReader
from staged_pool.runtime.models.tokenizing.tokenizer import TextTokenizer
from staged_pool.runtime.requests import Chat
from staged_pool.runtime.statistics import ImageCacheStatistics, ReplicaStatistics
from staged_pool.runtime.tokens import Tokens
from staged_pool.stages.errors import Unsupported


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFront:
    """A `runtime.model.Preparer`. Thread-safe."""

    card: ModelCard
    padded: tuple[Lane, ...]
    """Lanes whose batches are padded to their longest input."""
    tokenizer: TextTokenizer | None
    """None: the model reads no texts."""
    images: ImageReader | None
    """None: the model reads no images."""
    image_inputs: LoneImageReader | MultimodalReader | None
    """Preprocessor of the lane of images. None: there is no such lane."""

    def pads(self, lane: Lane) -> bool:
        return lane in self.padded

    def preprocess(self, inputs: Sequence[ModelInput]) -> Sequence[Preprocessed]:
        if not inputs:
            return []
        if inputs[0].lane == "image":
            assert self.image_inputs is not None
            return self.image_inputs.read(inputs)
        assert self.tokenizer is not None
        return cast("Sequence[Preprocessed]", self.tokenizer.preprocess(inputs))

    def tokenize(self, source: str | Chat, *, add_special_tokens: bool) -> Tokens:
        if isinstance(source, Chat) and source.images:
            if not isinstance(self.image_inputs, MultimodalReader):
                raise Unsupported(f"The model `{self.card.name}` does not read images as tokens.")
            return self.image_inputs.tokenize(source, add_special_tokens=add_special_tokens)
        return self._text_tokenizer().tokenize(source, add_special_tokens=add_special_tokens)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._text_tokenizer().detokenize(ids, skip_special_tokens=skip_special_tokens)

    @property
    def devices(self) -> Sequence[ReplicaStatistics]:
        return ()

    @property
    def image_cache(self) -> ImageCacheStatistics | None:
        return None if self.images is None else self.images.cache

    def clear_image_cache(self) -> None:
        if self.images is not None:
            self.images.clear_cache()

    def close(self) -> None:
        if self.images is not None:
            self.images.close()

    @property
    def preparation(self) -> Preparation:
        """The preparation of inputs as plain values, for `load_front_model`.

        Writing a large tokenizer takes up to a second.
        """
        images, inputs = self.images, self.image_inputs
        return Preparation(
            padded=self.padded,
            text=None if self.tokenizer is None else TextPreparation.of(self.tokenizer),
            image=None if images is None or inputs is None else ImagePreparation.of(images, inputs),
        )

    def _text_tokenizer(self) -> TextTokenizer:
        if self.tokenizer is None:
            raise Unsupported(f"The model `{self.card.name}` reads no texts, so it has no tokenizer.")
        return self.tokenizer


def load_front_model(
    config: EngineConfig,
    found: FoundModel,
    card: ModelCard,
    preparation: Preparation,
    memory: MemoryBudget | None = None,
) -> ModelFront:
    """Load the front of a model whose weights are loaded elsewhere.

    Args:
        config: The settings that the weights were loaded with.
        found: The folder of the model. Only an image processor of the exact path or of custom code is read again.
        card: Card of the loaded model.
        preparation: `preparation` of the loaded model.
        memory: Memory budget of image decodes. None: they are not limited.

    Raises:
        ConfigError: The folder's image processor can no longer be loaded.
    """
    text, image = preparation.text, preparation.image
    tokenizer = None if text is None else text.build()
    reader = None if image is None else _image_reader(image, found.folder.body, config, memory)
    inputs: LoneImageReader | MultimodalReader | None = None
    if image is not None and reader is not None:
        if image.lone is not None:
            inputs = LoneImageReader(reader, image.lone)
        elif image.embedded is not None and tokenizer is not None:
            inputs = MultimodalReader(tokenizer, *image.embedded, reader)
    return ModelFront(card=card, padded=preparation.padded, tokenizer=tokenizer, images=reader, image_inputs=inputs)


def _image_reader(
    image: ImagePreparation, folder: Path, config: EngineConfig, memory: MemoryBudget | None
) -> ImageReader:
    processor = None
    if image.reason is not None and not image.custom_code:
        processor = load_processor(folder, trust_remote_code=False)
    return ImageReader(image.settings(folder), config, memory, reason=image.reason, processor=processor)
