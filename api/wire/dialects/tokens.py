"""vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from staged_pool.api.wire import json_decode
from staged_pool.api.wire.body_fields import read_body
from staged_pool.api.wire.chat import ChatFields, check_chat_fields, conversations
from staged_pool.api.wire.chunked_json import dump
from staged_pool.api.wire.exchange import Body
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.fields import ModelName
from staged_pool.runtime.requests import Chat
from staged_pool.runtime.tokens import Tokens


class TokenizeBody(ChatFields, kw_only=True):
    """Body of `/tokenize`; fields that are not named here are ignored."""

    prompt: str | None = None
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """One conversation, as an alternative to `prompt`."""
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    """Body of `/detokenize`; fields that are not named here are ignored."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]
    model: ModelName | None = None


_TOKENIZE: Final = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE: Final = msgspec.json.Decoder(DetokenizeBody)


def decode_tokenize(body: Body) -> tuple[str | Chat, TokenizeBody]:
    """Read a request for the tokens of one text or conversation.

    Returns:
        The text or conversation, and the fields; `add_special_tokens` and `return_token_strs` are not None.

    Raises:
        InvalidInput: A field is missing or wrong.
    """
    fields = read_body(_TOKENIZE, body)
    messages = None if isinstance(fields.messages, msgspec.UnsetType) else fields.messages
    if messages is not None and json_decode.is_null(messages):
        messages = None
    if messages is not None and fields.prompt is not None:
        raise field_error("messages", "give either `prompt` or `messages`")
    if fields.add_special_tokens is None:
        fields.add_special_tokens = messages is None
    fields.return_token_strs = bool(fields.return_token_strs)
    if messages is None:
        if fields.prompt is None:
            raise field_error("prompt", "this field is required")
        return fields.prompt, fields
    if fields.add_generation_prompt is None:
        fields.add_generation_prompt = not fields.continue_final_message
    check_chat_fields(fields)
    chats = conversations(messages, fields, "messages")
    if len(chats) > 1:
        raise field_error("messages", "expected one conversation")
    return chats[0], fields


def encode_tokens(tokens: Tokens, *, max_tokens: int, with_strings: bool) -> bytes:
    """Write the answer of `/tokenize`.

    Args:
        tokens: The tokens.
        max_tokens: Maximum input length of the model, in tokens.
        with_strings: Write each token as a text, too.
    """
    return dump(
        {
            "count": len(tokens.ids),
            "max_model_len": max_tokens,
            "tokens": tokens.ids,
            "token_strs": tokens.strings if with_strings else None,
        }
    )


def decode_detokenize(body: Body) -> DetokenizeBody:
    """Read a request for the text of tokens.

    Raises:
        InvalidInput: A field is missing or wrong.
    """
    return read_body(_DETOKENIZE, body)


def encode_text(text: str) -> bytes:
    """Write the answer of `/detokenize`."""
    return dump({"prompt": text})
