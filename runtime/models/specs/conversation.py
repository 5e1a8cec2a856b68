"""Settings of models that read images, or conversations only, as frozen values without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTexts:
    """Texts around the tiles of an image, from Idefics3's processor of transformers."""

    image: str = "<image>"
    """Token that stands for each vector of a tile."""
    around: str = "<fake_token_around_image>"
    """Token before each tile, and after the last one."""
    whole: str = "<global-img>"
    """Text before the tile of the whole image."""
    of_tile: str = "<row_{row}_col_{column}>"
    """Text before another tile, whose row and column count from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """Image input of a language model: image vectors replace image tokens, several per image."""

    frame: tuple[str, str] | None
    """Text before and after a single image. None: the chat template writes it."""
    left_out: str = ""
    """Beginning of the text before a single image that pooling leaves out."""
    takes_conversations: bool
    """True if images and texts may stand together in a conversation."""
    pixels: tuple[int, int] | None = None
    """Fewest and most pixels of a resized image. None: as the image processor says."""
    ignored_texts: tuple[str, ...] = ()
    """Texts that may accompany an image without conversations: `frame` has them already, so they are ignored."""
    tiles: TileTexts | None = None
    """Texts around the tiles of an image. None: an image is not cut into tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationForm:
    """Inputs of an embedding model that reads each as a message in a conversation.

    The prompt of an input is its system message. A conversation with a system message of its own keeps that one.
    """

    instruction: str = ""
    """System message of inputs without a prompt. Empty: there is none."""
    ends_sentence: bool = False
    """Put a full stop after a prompt that has no punctuation at its end."""
    empty: str = ""
    """Text that stands for an empty one."""
    add_generation_prompt: bool = True
    """End with the beginning of an answer: its last token is pooled."""
