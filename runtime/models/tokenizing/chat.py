"""Make one text of a conversation, with the chat template that came with the tokenizer.

Templates are jinja, and run in transformers' own sandbox. Compiled ones are kept there, and may be rendered in several
threads at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from jinja2 import TemplateError

from staged_pool.runtime.requests import Chat, Image
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
"""Names that are not a caller's to set."""

_MARK: Final = re.compile(r"<[^<>\s]{1,64}>")
"""A special token, as tokenizers spell them."""


def plain_text(chat: Chat) -> str:
    """What a conversation says, for models that have no template: its messages without their roles.

    It is vLLM's fallback for models of one text or one image: contents one behind the other, parts in lines.
    """
    said = []
    for message in chat.messages:
        content = message.get("content")
        parts = content if isinstance(content, tuple) else (content,)
        said.append("\n".join(part for part in parts if isinstance(part, str)))
    return "".join(said)


def without_marks(text: str) -> str:
    """A text without special tokens such as `<|im_end|>`, and with single blanks for all white space."""
    return " ".join(_MARK.sub(" ", text).split())


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A jinja template, and what it is given beside messages."""

    source: str
    special_tokens: Mapping[str, object] = field(default_factory=dict)
    """The text of each by its name, such as `bos_token`."""
    sees: bool = False
    """Whether it takes the content of a message in parts, as templates of models that are shown images do."""

    def chat(self, chat: Chat, prompt: str = "") -> str:
        """A conversation as one text.

        Args:
            chat: What was said.
            prompt: Becomes a system message before it, as in sentence-transformers. Empty: nothing does.

        Raises:
            InvalidInput: The template does not take these messages or arguments.
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
        """With the parts of its content as templates know them; for those of models of texts, as one text."""
        content = message.get("content")
        if not isinstance(content, tuple):
            return message
        if not self.sees and all(isinstance(part, str) for part in content):
            return {**message, "content": "\n".join(content)}
        parts = [{"type": "image"} if isinstance(part, Image) else {"type": "text", "text": part} for part in content]
        return {**message, "content": parts}

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        arguments: Mapping[str, object],
    ) -> str:
        """Messages as one text, as `apply_chat_template` of transformers renders them.

        Raises:
            InvalidInput: The template does not take them.
        """
        # A field that is null is one that is not there: templates would spell it out.
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
            # What was raised may repeat the messages, so it is neither shown nor kept as the cause.
            message = "The model's chat template does not take these messages and arguments."
            raise InvalidInput(message, param="messages") from None
        text: str = texts[0]
        return text
