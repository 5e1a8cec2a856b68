"""The part of a model that prepares its inputs, without weights.

A front, whose engine process has the weights, loads this part alone. Texts need no torch. Images import it: on the fast
path with `warm_up` or the first image, since torch resizes them; on the exact path with `load_preparer`, since
transformers imports torch with every image processor. Custom code of a folder imports it in processes of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from staged_pool.runtime.card import Lane, ModelCard
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.memory.budget import MemoryBudget
from staged_pool.runtime.model import ModelInput, Preprocessed
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.images.settings import load_processor
from staged_pool.runtime.models.images.torchvision import leave_out_broken_torchvision
from staged_pool.runtime.models.preparation import ImagePreparation, Preparation, TextPreparation
from staged_pool.runtime.models.tokenizing.images import MultimodalReader
from staged_pool.runtime.models.tokenizing.lone_images import LoneImageReader
from staged_pool.runtime.models.tokenizing.tokenizer import TextTokenizer
from staged_pool.runtime.models.videos.reader import VideoReader
from staged_pool.runtime.requests import Chat
from staged_pool.runtime.statistics import ImageCacheStatistics, ReplicaStatistics
from staged_pool.runtime.tokens import Tokens
from staged_pool.runtime.workers.pool import WorkerPool
from staged_pool.stages.errors import Unsupported


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputPreparer:
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
    text_workers: WorkerPool | None = None
    """Processes that tokenize. None: the calling thread does."""

    def pads(self, lane: Lane) -> bool:
        return lane in self.padded

    def preprocess(self, inputs: Sequence[ModelInput]) -> Sequence[Preprocessed]:
        if not inputs:
            return []
        if inputs[0].lane == "image":
            assert self.image_inputs is not None
            return self.image_inputs.read(inputs)
        if self.text_workers is not None:
            return cast("Sequence[Preprocessed]", self.text_workers.call(inputs))
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

    def warm_up(self, lane: Lane) -> None:
        """Prepare an input of a lane. Conversations import transformers late, and images torch.

        Such an import takes seconds, and holds the interpreter's lock for most of them: requests must not wait for it.
        """
        if lane == "image" and self.images is not None:
            self.images.warm_up()
        elif self.tokenizer is not None:
            self.tokenizer.warm_up()

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
        if self.text_workers is not None:
            self.text_workers.close()
        if self.images is not None:
            self.images.close()

    @property
    def preparation(self) -> Preparation:
        """The preparation of inputs as plain values, for `load_preparer`.

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


def load_preparer(
    config: EngineConfig, card: ModelCard, preparation: Preparation, memory: MemoryBudget | None = None
) -> InputPreparer:
    """Load the preparer of a model whose weights another process has loaded.

    Args:
        config: Settings of images: their limits, cache, draft and threads.
        card: Card of the loaded model.
        preparation: `preparation` of the loaded model.
        memory: Memory budget of image decodes. None: they are not limited.

    Raises:
        ConfigError: An image processor of the exact path, or one of custom code, can no longer be loaded.
    """
    text, image = preparation.text, preparation.image
    tokenizer = None if text is None else text.build()
    reader = None if image is None else _image_reader(image, config, memory)
    inputs: LoneImageReader | MultimodalReader | None = None
    if image is not None and reader is not None:
        if image.lone is not None:
            inputs = LoneImageReader(reader, image.lone)
        elif image.embedded is not None and tokenizer is not None:
            videos = None if image.videos is None else VideoReader(image.videos, config, reader)
            inputs = MultimodalReader(tokenizer, *image.embedded, reader, videos)
    return InputPreparer(
        card=card,
        padded=preparation.padded,
        tokenizer=tokenizer,
        images=reader,
        image_inputs=inputs,
        text_workers=open_text_workers(config, text),
    )


def open_text_workers(config: EngineConfig, text: TextPreparation | None) -> WorkerPool | None:
    """Start the processes that tokenize. None: threads do, or the model reads no texts."""
    if text is None or config.preprocess_place() == "thread":
        return None
    return WorkerPool("texts", text, config.preprocess_limit)


def _image_reader(image: ImagePreparation, config: EngineConfig, memory: MemoryBudget | None) -> ImageReader:
    settings, processor = image.settings(), None
    if image.reason is not None and config.preprocess_place(custom_code=image.custom_code) == "thread":
        leave_out_broken_torchvision()
        processor = load_processor(settings.folder, trust_remote_code=image.custom_code)
    return ImageReader(settings, config, memory, reason=image.reason, processor=processor)
