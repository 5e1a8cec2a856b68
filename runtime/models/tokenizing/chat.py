"""Chat templates, which render a conversation as one text.

Templates are Jinja and run in transformers' sandbox, which caches compiled templates. They may be rendered in several
threads at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from jinja2 import TemplateError

from staged_pool.runtime.requests import Chat, Image, Video
from staged_pool.stages.errors import InvalidInput

_RESERVED: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "messages",
        "return_assistant_tokens_mask",
    }
)
"""Template arguments that a caller may not set."""

_MARK: Final = re.compile(r"<[^<>\s]{1,64}>")
"""A special token, as tokenizers spell them."""


def plain_text(chat: Chat) -> str:
    """Join the texts of a conversation, without roles, for models without a chat template.

    This is vLLM's fallback for models of one text or one image: contents are concatenated, and the parts of one content
    are joined by line breaks.
    """
    texts = []
    for message in chat.messages:
        content = message.get("content")
        parts = content if isinstance(content, tuple) else (content,)
        texts.append("\n".join(part for part in parts if isinstance(part, str)))
    return "".join(texts)


def without_special_tokens(text: str) -> str:
    """Remove special tokens such as `<|im_end|>`, and collapse white space to single spaces."""
    return " ".join(_MARK.sub(" ", text).split())


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja chat template and its constant arguments."""

    source: str
    special_tokens: Mapping[str, object] = field(default_factory=dict)
    """The text of each special token by its name, such as `bos_token`."""
    takes_parts: bool = False
    """True if a message's content may be a list of parts, as for vision-language models."""

    def chat(self, chat: Chat, prompt: str = "") -> str:
        """Render a conversation as one text.

        Args:
            chat: The conversation.
            prompt: Text of a system message before it, as in sentence-transformers. Empty: no system message.

        Raises:
            InvalidInput: The template does not accept these messages or arguments.
        """
        if chat.add_generation_prompt and chat.continue_final_message:
            raise InvalidInput(
                "add_generation_prompt and continue_final_message exclude each other.", param="add_generation_prompt"
            )
        if not chat.messages:
            raise InvalidInput("The conversation has no messages; it must have at least one.", param="messages")
        if taken := sorted(_RESERVED & chat.template_arguments.keys()):
            raise InvalidInput(f"{taken[0]} is not an argument of chat templates.", param="chat_template_kwargs")
        messages: list[Mapping[str, object]] = [{"role": "system", "content": prompt}] if prompt else []
        return self.render(
            [*messages, *map(self._message, chat.messages)],
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            arguments=chat.template_arguments,
        )

    def _message(self, message: Mapping[str, object]) -> Mapping[str, object]:
        """Convert a content of several parts: to a list for `takes_parts`, else to one text if there is no image."""
        content = message.get("content")
        if not isinstance(content, tuple):
            return message
        if not self.takes_parts and all(isinstance(part, str) for part in content):
            return {**message, "content": "\n".join(content)}
        parts = [message_part(part) for part in content]
        return {**message, "content": parts}

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        arguments: Mapping[str, object],
    ) -> str:
        """Render messages as one text, as `apply_chat_template` of transformers does.

        Raises:
            InvalidInput: The template does not accept them.
        """
        # Fields with null are dropped, because templates would write them out as "None".
        present = [{name: value for name, value in message.items() if value is not None} for message in messages]
        given: dict[str, Any] = {**self.special_tokens, **arguments}
        try:
            from transformers.utils.chat_template_utils import render_jinja_template  # seconds to import

            texts, _ = render_jinja_template(
                [present],
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **given,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError):
            # The error may quote the messages, so it is neither reported nor kept as the cause.
            message = "The model's chat template does not accept these messages and arguments."
            raise InvalidInput(message, param="messages") from None
        text: str = texts[0]
        return text


def message_part(part: object) -> Mapping[str, object]:
    """Return a part of a message as chat templates take it."""
    if isinstance(part, Image):
        return {"type": "video" if isinstance(part, Video) else "image"}
    return {"type": "text", "text": part}
