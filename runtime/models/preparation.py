"""Preparation of inputs as plain values, for processes without the weights of a model.

All types are dataclasses, tuples, mappings, numbers and strings, so that any codec of typed values can carry them to
another process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from staged_pool.runtime.card import Lane
from staged_pool.runtime.model import ModelInput, Preprocessed
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.images.scale import Scale
from staged_pool.runtime.models.images.settings import ImageSettings, Resample
from staged_pool.runtime.models.images.sizes import (
    FixedSize,
    PatchBudget,
    PixelRange,
    Resize,
    ShortestEdge,
    Size,
    TileGrid,
)
from staged_pool.runtime.models.specs.conversation import ImageSpec
from staged_pool.runtime.models.tokenizing.images import MultimodalReader
from staged_pool.runtime.models.tokenizing.lone_images import ImageTokens, LoneImageReader
from staged_pool.runtime.models.tokenizing.shared_tokenizer import SharedTokenizer
from staged_pool.runtime.models.tokenizing.text_settings import TextSettings
from staged_pool.runtime.models.tokenizing.tokenizer import TextTokenizer
from staged_pool.runtime.models.videos.settings import VideoSettings
from staged_pool.runtime.models.vision.image_layout import ImageLayout

_RULES: Final[dict[str, Callable[..., Resize]]] = {
    rule.__name__: rule for rule in (FixedSize, PatchBudget, PixelRange, ShortestEdge, TileGrid)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPreparation:
    """A tokenizer and its settings."""

    tokenizer: str
    """The tokenizer as it is used, in the form of `tokenizer.json`: up to tens of megabytes."""
    splits_special_tokens: bool
    """True if a special token in a text is read as ordinary text."""
    settings: TextSettings

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> TextPreparation:
        """Describe a tokenizer."""
        used = tokenizer.shared.tokenizer
        return cls(
            tokenizer=used.to_str(),
            splits_special_tokens=used.encode_special_tokens,
            settings=tokenizer.settings,
        )

    def open(self) -> Callable[[Sequence[ModelInput]], Sequence[Preprocessed]]:
        """Return `TextTokenizer.preprocess`: this is a `runtime.workers.jobs.Work`."""
        tokenizer = self.build()
        tokenizer.warm_up()
        return tokenizer.preprocess

    def build(self) -> TextTokenizer:
        """Build a tokenizer that gives the same tokens."""
        used = Tokenizer.from_str(self.tokenizer)
        used.encode_special_tokens = self.splits_special_tokens
        return TextTokenizer(SharedTokenizer(used), self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePreparation:
    """`ImageSettings` of a model, and the form of its inputs with images."""

    folder: str
    """Folder of the image processor, which only the exact path and custom code read again."""
    processor: str
    resize: tuple[str, tuple[int, ...]] | None
    """Class of the rule of resizing, and its numbers."""
    resample: Resample | None
    crop: Size | None
    patch_size: int | None
    merge_size: int
    scale: Scale
    custom_code: bool
    unknown: str | None
    reason: str | None
    """Reason for the exact path. None: images take the fast path."""
    lone: ImageTokens | None
    """For a model that reads one image at a time: the tokens of an image."""
    embedded: tuple[ImageSpec, ImageLayout] | None
    """For a vision-language model: the texts around its images, and the image tokens in its sequences."""
    videos: VideoSettings | None
    """None: the model reads no videos."""

    @classmethod
    def of(cls, images: ImageReader, inputs: LoneImageReader | MultimodalReader) -> ImagePreparation:
        """Describe the reader of a model's images, and that of its inputs with images."""
        given = images.settings
        return cls(
            folder=str(given.folder),
            processor=given.processor,
            resize=None
            if given.resize is None
            else (type(given.resize).__name__, tuple(map(int, astuple(given.resize)))),
            resample=given.resample,
            crop=given.crop,
            patch_size=given.patch_size,
            merge_size=given.merge_size,
            scale=given.scale,
            custom_code=given.custom_code,
            unknown=given.unknown,
            reason=images.reason,
            lone=inputs.tokens if isinstance(inputs, LoneImageReader) else None,
            embedded=(inputs.spec, inputs.layout) if isinstance(inputs, MultimodalReader) else None,
            videos=inputs.videos.settings if isinstance(inputs, MultimodalReader) and inputs.videos else None,
        )

    def settings(self) -> ImageSettings:
        """Return the settings that this describes."""
        return ImageSettings(
            folder=Path(self.folder),
            processor=self.processor,
            resize=None if self.resize is None else _RULES[self.resize[0]](*self.resize[1]),
            resample=self.resample,
            crop=self.crop,
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            scale=self.scale,
            custom_code=self.custom_code,
            unknown=self.unknown,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Preparation of the inputs of one model, derived from its folder and its weights."""

    padded: tuple[Lane, ...]
    """Lanes whose batches are padded to their longest input."""
    text: TextPreparation | None
    """None: the model reads no texts."""
    image: ImagePreparation | None
    """None: the model reads no images."""
