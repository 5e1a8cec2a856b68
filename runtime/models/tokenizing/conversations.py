"""Conversations around the inputs of embedding models, by the folder's chat template."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from functools import lru_cache
from typing import Final

from staged_pool.runtime.models.specs.conversation import ConversationForm
from staged_pool.runtime.models.tokenizing.chat import ChatTemplate
from staged_pool.runtime.requests import Chat
from staged_pool.stages.errors import ConfigError, InvalidInput

_MARK: Final = "  \U000f5afe\n\U000f1d0c  "
"""Placeholder of a text: private characters between white space, which no template may strip."""

_KNOWN_PROMPTS: Final = 256
"""Prompts whose rendered texts are kept."""


class ConversationWriter:
    """Renders inputs as conversations. Thread-safe.

    Args:
        form: The form of the inputs.
        template: The chat template of the folder. None: it has none.

    Raises:
        ConfigError: There is no chat template, or it does not write a text as it is.
    """

    def __init__(self, form: ConversationForm, template: ChatTemplate | None) -> None:
        if template is None:
            raise ConfigError("the model reads conversations, but its tokenizer has no chat template")
        self._form = form
        self._template = template
        self.around = lru_cache(_KNOWN_PROMPTS)(self._around)
        """Cached `_around`."""
        try:
            self.end = self.around("")[1]
        except InvalidInput as error:
            raise ConfigError("the chat template does not accept a message of one text") from error

    end: str
    """Text after the text of a conversation with one message."""

    def _around(self, prompt: str) -> tuple[str, str]:
        """Render the text before and after the text of a conversation with one message.

        Raises:
            InvalidInput: The template does not accept the messages.
            ConfigError: It does not write the text as it is.
        """
        written = self.write(Chat(({"role": "user", "content": _MARK},)), prompt)
        if written.count(_MARK) != 1:
            raise ConfigError("the chat template does not write the text of a message as it is")
        before, _, after = written.partition(_MARK)
        return before, after

    def text(self, text: str) -> str:
        """Return the text that stands for one of the caller."""
        return text or self._form.empty

    def write(self, chat: Chat, prompt: str = "") -> str:
        """Render a conversation, with the prompt or the usual instruction as its system message.

        Raises:
            InvalidInput: The template does not accept the conversation.
        """
        roles = [message.get("role") for message in chat.messages]
        system = "" if roles[:1] == ["system"] else self._instruction(prompt)
        if self._form.add_generation_prompt and not chat.continue_final_message and roles[-1:] != ["assistant"]:
            chat = replace(chat, add_generation_prompt=True)
        return self._template.chat(chat, system)

    def _instruction(self, prompt: str) -> str:
        if not self._form.ends_sentence:
            return prompt or self._form.instruction
        given = prompt.strip()
        if given and not unicodedata.category(given[-1]).startswith("P"):
            given += "."
        return given or self._form.instruction
