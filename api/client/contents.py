"""How inputs are written in a request: texts, token ids, pairs, images and conversations."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from staged_pool.runtime.requests import Chat, Content, Image, content_bytes
from staged_pool.stages.errors import InvalidInput

Given: TypeAlias = str | tuple[int, ...] | tuple[Content, Content] | Image | Chat
"""One input."""

_CHARACTERS_OF_AN_ID: Final = 7
_URLS: Final = ("http:", "https:", "file:", "data:")


@dataclass(frozen=True, slots=True)
class Form:
    """What the inputs of one request have in common."""

    kind: str
    fields: Mapping[str, object] = field(default_factory=dict)
    """Of the body, which hold for all of them."""


_CONTENTS: Final = Form("contents")
_IDS: Final = Form("token ids")
_PAIRS: Final = Form("pairs")


def form(given: Given) -> Form:
    """Inputs of the same form can go in one request.

    Raises:
        InvalidInput: The images of a conversation have different options, which a request cannot say.
    """
    if isinstance(given, str):
        return _CONTENTS
    if isinstance(given, Image):
        return Form(_CONTENTS.kind, options((given,)))
    if isinstance(given, Chat):
        fields: dict[str, object] = {
            "add_generation_prompt": given.add_generation_prompt,
            "continue_final_message": given.continue_final_message,
            **({"chat_template_kwargs": given.template_arguments} if given.template_arguments else {}),
            **options((given,)),
        }
        return Form("conversations", fields)
    return _IDS if not given or isinstance(given[0], int) else _PAIRS


def options(contents: Iterable[Content]) -> dict[str, object]:
    """The field that holds the options of their images, where they have any.

    Raises:
        InvalidInput: They have different ones.
    """
    found = [image.options for content in contents for image in _images(content)]
    if any(one != found[0] for one in found):
        raise InvalidInput("The images that go in one request must have the same options.", param="input")
    return {"mm_processor_kwargs": found[0]} if found and found[0] else {}


def characters(given: Given) -> int:
    """About what an input takes in a body."""
    if isinstance(given, tuple):
        return sum(_CHARACTERS_OF_AN_ID if isinstance(part, int) else characters(part) for part in given)
    return content_bytes(given) * 4 // 3


def written(given: Given) -> object:
    """An element of `input`."""
    if isinstance(given, Image):
        return {"image": _source(given)}
    if isinstance(given, Chat):
        return _messages(given)
    return given


def document(content: Content) -> object:
    """A query or a document.

    Raises:
        InvalidInput: It is a conversation of other than one message.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, Image):
        return {"content": [_part(content)]}
    if len(content.messages) != 1:
        raise InvalidInput("A query or a document is one message, which holds texts and images.", param="documents")
    said = content.messages[0].get("content")
    return {"content": [_part(part) for part in (said if isinstance(said, tuple) else (said,))]}


def _images(content: Content) -> tuple[Image, ...]:
    if isinstance(content, Image):
        return (content,)
    return content.images if isinstance(content, Chat) else ()


def _messages(chat: Chat) -> list[Mapping[str, object]]:
    return [
        {**message, "content": [_part(part) for part in said]}
        if isinstance(said := message.get("content"), tuple)
        else message
        for message in chat.messages
    ]


def _part(part: object) -> Mapping[str, object]:
    if isinstance(part, Image):
        name = {} if part.key is None else {"uuid": part.key}
        return {"type": "image_url", "image_url": {"url": _source(part)}, **name}
    return {"type": "text", "text": part}


def _source(image: Image) -> str:
    """A URL: of its own, or one that holds the file. What kind of a file it is, is for the server to find out."""
    if isinstance(image.source, str):
        if not image.source.lower().startswith(_URLS):
            raise InvalidInput("An Image is made of the bytes of a file, or of its URL.", param="input")
        return image.source
    return "data:image/*;base64," + base64.b64encode(image.source).decode("ascii")
