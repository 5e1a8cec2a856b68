"""Inputs of a request: texts, token ids, conversations, images or pairs, in all forms that clients send."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from staged_pool.api.wire import json_decode
from staged_pool.api.wire.chat import ChatFields, check_chat_fields, conversation, conversations
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.field_names import InputPaths
from staged_pool.api.wire.fields import NOT_SPECIFIED, MaxTokens, ModelName
from staged_pool.api.wire.images import read_image, with_options
from staged_pool.api.wire.jina import object_inputs
from staged_pool.api.wire.texts_or_ids import places_of_texts, texts_or_ids
from staged_pool.api.wire.truncation import TruncationSide, side_of
from staged_pool.runtime.requests import Chat, Image, PairInput, TextInput
from staged_pool.stages.errors import InvalidInput

Modality: TypeAlias = Literal["text", "image"]
Source: TypeAlias = str | tuple[int, ...] | Chat | Image

_TEXT_LISTS: Final = msgspec.json.Decoder(list[list[str]])
_OBJECT: Final = re.compile(rb"[{]")


class _Model(msgspec.Struct):
    model: ModelName | None = None


_MODEL: Final = msgspec.json.Decoder(_Model)


def model_of(body: bytes | bytearray) -> str | None:
    """Return the model that a request names; other fields are not checked.

    Raises:
        InvalidInput: See `json_decode.decode`.
    """
    name = json_decode.decode(_MODEL, body).model
    return None if name == NOT_SPECIFIED else name


class InputFields(ChatFields, kw_only=True):
    """Fields with the inputs of a request; fields that are not named here are ignored."""

    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """`str | list[str] | list[int] | list[list[int]]`, conversations, or objects with a text, an image or both."""
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """One conversation, or a list of them."""
    truncate_prompt_tokens: MaxTokens | None = None
    truncation_side: TruncationSide | None = None
    add_special_tokens: bool | None = None
    """None: add them to texts, but not to conversations, whose template writes them."""


def inputs_of(fields: InputFields, modality: Modality = "text") -> tuple[tuple[TextInput | Image, ...], InputPaths]:
    """Return the inputs and their paths.

    Args:
        fields: Fields of the request.
        modality: Meaning of a text in `input`: a text, or an image's URL or base64.

    Raises:
        InvalidInput: A field is missing or wrong; the message says what would be right.
    """
    field, raw = _given(fields)
    sources, places = _conversations(raw, fields, field) if field == "messages" else _sources(raw, fields)
    if modality == "image":
        sources = [_named_image(source, index) for index, source in enumerate(sources)]
    options = fields.media_options()
    inputs = tuple(
        with_options(source, options) if isinstance(source, Image) else _text_input(source, fields)
        for source in sources
    )
    return inputs, places


def text_inputs(fields: InputFields) -> tuple[tuple[TextInput, ...], InputPaths]:
    """Return the inputs and their paths for a task that images do not have; see `inputs_of`.

    Raises:
        InvalidInput: An input is an image, or see `inputs_of`.
    """
    inputs, places = inputs_of(fields)
    for index, given in enumerate(inputs):
        if isinstance(given, Image):
            what = "expected a text, token ids or a conversation; images have no tokens"
            raise field_error(places("input", index), what, index)
    return tuple(given for given in inputs if isinstance(given, TextInput)), places


def text_or_pair_inputs(fields: InputFields) -> tuple[tuple[TextInput | PairInput | Image, ...], InputPaths]:
    """Return the inputs and their paths; a list of lists of two texts is a list of pairs.

    Raises:
        InvalidInput: See `inputs_of`.
    """
    field, raw = _given(fields)
    if field == "input" and json_decode.shape(raw) == (2, b'"'):
        lists = json_decode.decode(_TEXT_LISTS, raw, root="input")
        return tuple(_pair_input(texts, index, fields) for index, texts in enumerate(lists)), InputPaths("input")
    return inputs_of(fields)


def check_max_tokens(value: int | None) -> None:
    """Reject a `truncate_prompt_tokens` of 0.

    Raises:
        InvalidInput: The value is 0.
    """
    if value == 0:
        raise field_error("truncate_prompt_tokens", "0 leaves nothing of an input; expected -1 or at least 1")


def _given(fields: InputFields) -> tuple[str, msgspec.Raw]:
    """Return the field that holds the inputs, and its value."""
    check_max_tokens(fields.truncate_prompt_tokens)
    check_chat_fields(fields)
    messages, given = fields.messages, fields.input
    if isinstance(messages, msgspec.Raw) and not json_decode.is_null(messages):
        if isinstance(given, msgspec.Raw) and not json_decode.is_null(given):
            raise field_error("messages", "give either `input` or `messages`")
        return "messages", messages
    if isinstance(given, msgspec.UnsetType):
        raise field_error("input", "this field is required")
    return "input", given


def _conversations(raw: msgspec.Raw, fields: InputFields, root: str) -> tuple[Sequence[Source], InputPaths]:
    return conversations(raw, fields, root), InputPaths(root, several=json_decode.shape(raw)[0] == 2)


def _sources(raw: msgspec.Raw, fields: InputFields) -> tuple[Sequence[Source], InputPaths]:
    depth, first = json_decode.shape(raw)
    if first == b"{":
        objects = _objects(raw, fields) if depth < 2 else None
        return _conversations(raw, fields, "input") if objects is None else objects
    try:
        sources = texts_or_ids(raw, "input", none="You must pass at least one prompt")
    except InvalidInput:
        if (depth, first) != (1, b'"') or not _OBJECT.search(memoryview(raw)):
            raise
        return _objects(raw, fields) or ((), InputPaths("input"))  # a list of texts and objects
    return sources, places_of_texts(raw, "input")


def _objects(raw: msgspec.Raw, fields: InputFields) -> tuple[Sequence[Source], InputPaths] | None:
    """Read input objects; None if they are messages. Texts and images of one object become a conversation."""
    found = object_inputs(raw, "input")
    if found is None:
        return None
    sources, places = found
    return [conversation(each.messages, fields) if isinstance(each, Chat) else each for each in sources], places


def _named_image(source: Source, index: int) -> Image:
    if isinstance(source, Image):
        return source
    if isinstance(source, str):
        return read_image(source, f"input[{index}]", index, bare=True)
    raise field_error(f"input[{index}]", "expected an image: a URL, a data URL or base64", index)


def _text_input(source: str | tuple[int, ...] | Chat, fields: InputFields) -> TextInput:
    added = not isinstance(source, Chat) if fields.add_special_tokens is None else fields.add_special_tokens
    return TextInput(
        source,
        max_tokens=fields.truncate_prompt_tokens,
        truncate_side=side_of(fields.truncation_side),
        add_special_tokens=added,
    )


def _pair_input(texts: list[str], index: int, fields: InputFields) -> PairInput:
    """Make a pair; reject the fields that have no meaning for a pair."""
    if len(texts) != 2:
        raise field_error(f"input[{index}]", f"a pair has 2 texts, not {len(texts)}", index)
    if fields.add_special_tokens is False:
        raise field_error("add_special_tokens", "a pair is not a pair without the tokens between its texts")
    return PairInput(
        first=texts[0],
        second=texts[1],
        max_tokens=fields.truncate_prompt_tokens,
        truncate_side=side_of(fields.truncation_side),
    )
