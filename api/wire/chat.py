"""Conversations in the form of chat completions: lists of messages with a text or parts as content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from staged_pool.api.wire import json_decode
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.fields import RequestFields
from staged_pool.api.wire.images import with_options
from staged_pool.api.wire.parts import ContentPart, joined
from staged_pool.runtime.requests import Chat, Image
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.foreign_json import MOST_DEPTH

_MESSAGES: Final = msgspec.json.Decoder(list[dict[str, Any]])
_MESSAGE_LISTS: Final = msgspec.json.Decoder(list[list[dict[str, Any]]])


class ChatFields(RequestFields, kw_only=True):
    """Fields that control how the template renders a conversation."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    """Rejected: a template is a program, so only the model's own is run."""


def check_chat_fields(fields: ChatFields) -> None:
    """Reject fields that are wrong for any conversation.

    Raises:
        InvalidInput: `chat_template` is set, or two fields contradict each other.
    """
    if fields.chat_template is not None:
        message = (
            "Chat template is passed with request, but only the model's own is run. "
            "Refused request with untrusted chat template."
        )
        raise InvalidInput(message, param="chat_template")
    if fields.add_generation_prompt and fields.continue_final_message:
        message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        raise InvalidInput(message, param="continue_final_message")


def conversations(raw: msgspec.Raw, fields: ChatFields, root: str) -> list[Chat]:
    """Read one conversation, or a list of them.

    Args:
        raw: The field's value.
        fields: Fields of the request.
        root: The field's name.

    Raises:
        InvalidInput: A message or a part is wrong; the message says which.
    """
    depth, first = json_decode.shape(raw)
    if depth == 1 and first == b"{":
        return [
            _chat(json_decode.decode(_MESSAGES, raw, root=root, single=True, most_depth=MOST_DEPTH), fields, root, None)
        ]
    if depth == 2:
        lists = json_decode.decode(_MESSAGE_LISTS, raw, root=root, most_depth=MOST_DEPTH)
        return [_chat(messages, fields, f"{root}[{index}]", index) for index, messages in enumerate(lists)]
    if depth == 1 and first == b"]":
        raise _none_of(root, None)
    raise InvalidInput(f"{root}: expected a list of messages, or a list of such lists", param=root)


def _chat(messages: list[dict[str, Any]], fields: ChatFields, where: str, index: int | None) -> Chat:
    if not messages:
        raise _none_of(where, index)
    read = tuple(_message(message, f"{where}[{place}]", index) for place, message in enumerate(messages))
    return conversation(read, fields)


def conversation(messages: tuple[Mapping[str, object], ...], fields: ChatFields) -> Chat:
    """Return a conversation of checked messages, with the settings of its template and images."""
    chat = Chat(
        messages=messages,
        add_generation_prompt=bool(fields.add_generation_prompt),
        continue_final_message=bool(fields.continue_final_message),
        template_arguments=fields.chat_template_kwargs or {},
    )
    return with_options(chat, fields.media_options())


def _none_of(where: str, index: int | None) -> InvalidInput:
    return field_error(where, "at least one message is needed", index)


def _message(message: dict[str, Any], where: str, index: int | None) -> Mapping[str, object]:
    """Check a message, and return it with its content joined by `joined`."""
    if "role" not in message:
        raise field_error(f"{where}.role", "this field is required", index)
    if not isinstance(message["role"], str):
        raise field_error(f"{where}.role", "expected a text", index)
    content = message.get("content")
    if isinstance(content, str):
        return message
    if content is None and message.get("tool_calls"):  # an assistant's tool calls have no content
        return message | {"content": ""}
    if "content" not in message:
        raise field_error(f"{where}.content", "this field is required", index)
    if not isinstance(content, list):
        raise field_error(f"{where}.content", "expected a text or a list of parts", index)
    parts = [_part(part, f"{where}.content[{place}]", index) for place, part in enumerate(content)]
    return message | {"content": joined([each for part in parts for each in part])}


def _part(part: object, where: str, index: int | None) -> list[str | Image]:
    if not isinstance(part, dict):
        raise field_error(where, "expected an object with a `type`", index)
    if not isinstance(part.get("type"), str | None):
        raise field_error(f"{where}.type", "expected a text", index)
    return ContentPart(**{name: part.get(name) for name in ContentPart.__struct_fields__}).read(where, index)
