"""Settings of models that read images, or conversations only, as frozen values without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """Image input of a language model: image vectors replace image tokens, several per image."""

    frame: tuple[str, str] | None
    """Text before and after a single image. None: the chat template writes it."""
    takes_conversations: bool
    """True if images and texts may stand together in a conversation."""
    pixels: tuple[int, int] | None = None
    """Fewest and most pixels of a resized image. None: as the image processor says."""
    ignored_texts: tuple[str, ...] = ()
    """Texts that may accompany an image without conversations: `frame` has them already, so they are ignored."""


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
