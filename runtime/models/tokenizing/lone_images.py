"""Inputs of one image without text, for models that read an image as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from staged_pool.runtime.model import ModelInput, Preprocessed
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.tokenizing.chat import plain_text
from staged_pool.runtime.payloads import Pixels, PreparedImage
from staged_pool.runtime.requests import Chat, Image, TextInput
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.work import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokens:
    """Rule for the number of vectors that a transformer computes for an image."""

    patch: tuple[int, int] | None
    """Height and width of a patch in pixels. None: images of any shape, prepared as patches."""
    extra: int = 0
    """Vectors besides those of the patches, such as a class token's."""

    def of(self, pixels: Pixels) -> int:
        """Return the number of vectors of a prepared image."""
        if self.patch is None:
            return len(pixels.values) + self.extra
        height, width = map(int, pixels.values.shape[1:])
        return (height // self.patch[0]) * (width // self.patch[1]) + self.extra


@dataclass(frozen=True, slots=True)
class LoneImageReader:
    """Preprocessor of images that come one by one. Every method may run in several threads at once."""

    images: ImageReader
    tokens: ImageTokens

    def read(self, inputs: Sequence[ModelInput]) -> Sequence[Preprocessed]:
        """Prepare each input, or return its error."""
        return [self._read(given) for given in inputs]

    def _read(self, given: ModelInput) -> Preprocessed:
        image = _lone_image(given)
        if image is None:
            message = (
                "This model reads one image or one text at a time, and no conversations of both: send them as separate "
                "inputs."
            )
            return InvalidInput(message, param="messages")
        try:
            pixels = self.images.read(image, given.sharing_scope)
        except InvalidInput as error:
            return error
        tokens = self.tokens.of(pixels)
        # Images of a batch have one shape, unless they come as patches and can be padded.
        shape = None if self.tokens.patch is None else pixels.values.shape
        return Prepared(
            PreparedImage(pixels, given.outputs, tokens), tokens=tokens, batch_key=("image", shape, given.outputs)
        )


def _lone_image(given: ModelInput) -> Image | None:
    """Return the image of an input, or of a conversation that holds nothing else; None for other inputs."""
    match given.source:
        case Image() as image:
            return image
        case TextInput(source=Chat() as chat) if not plain_text(chat).strip():
            return chat.images[0] if len(chat.images) == 1 else None
        case _:
            return None
