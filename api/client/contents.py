"""JSON of inputs in a request: texts, token ids, pairs, images, videos and conversations."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from staged_pool.runtime.requests import Chat, Content, Image, Video, content_bytes
from staged_pool.runtime.video_frames import split_frames
from staged_pool.stages.errors import InvalidInput

Given: TypeAlias = str | tuple[int, ...] | tuple[Content, Content] | Image | Chat
"""One input."""

_CHARACTERS_OF_AN_ID: Final = 7
_URLS: Final = ("http:", "https:", "file:", "data:")


@dataclass(frozen=True, slots=True)
class Form:
    """Form of inputs; one request has only inputs of one form."""

    kind: str
    fields: Mapping[str, object] = field(default_factory=dict)
    """Fields of the body that apply to all inputs."""


_CONTENTS: Final = Form("contents")
_IDS: Final = Form("token ids")
_PAIRS: Final = Form("pairs")


def form(given: Given) -> Form:
    """Return the form of an input.

    Raises:
        InvalidInput: The images of a conversation have different options, which a request cannot have.
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
    """Return the fields with the options of all images and of all videos; empty if there are none.

    Raises:
        InvalidInput: The images have different options, or the videos.
    """
    given = [image for content in contents for image in _images(content)]
    fields: dict[str, object] = {}
    videos = _same([each.options for each in given if isinstance(each, Video)], "videos")
    images = _same([each.options for each in given if not isinstance(each, Video)], "images")
    if images:
        has_videos = any(isinstance(each, Video) for each in given)  # they would have them, too
        fields["mm_processor_kwargs"] = {"images_kwargs": images} if has_videos else images
    if videos:
        fields["media_io_kwargs"] = {"video": videos}
    return fields


def _same(found: Sequence[Mapping[str, object]], kind: str) -> Mapping[str, object]:
    if any(each != found[0] for each in found):
        raise InvalidInput(f"The {kind} of one request must have the same options.", param="input")
    return found[0] if found else {}


def characters(given: Given) -> int:
    """Estimate the characters of an input in a body."""
    if isinstance(given, tuple):
        return sum(_CHARACTERS_OF_AN_ID if isinstance(part, int) else characters(part) for part in given)
    return content_bytes(given) * 4 // 3


def encoded(given: Given) -> object:
    """Return the JSON value of an element of `input`."""
    if isinstance(given, Image):
        return {"video" if isinstance(given, Video) else "image": _source(given)}
    if isinstance(given, Chat):
        return _messages(given)
    return given


def document(content: Content) -> object:
    """Return the JSON value of a query or a document.

    Raises:
        InvalidInput: It is a conversation of more or fewer messages than one.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, Image):
        return {"content": [_part(content)]}
    if len(content.messages) != 1:
        raise InvalidInput("A query or a document must be one message of texts and images.", param="documents")
    parts = content.messages[0].get("content")
    return {"content": [_part(part) for part in (parts if isinstance(parts, tuple) else (parts,))]}


def _images(content: Content) -> tuple[Image, ...]:
    if isinstance(content, Image):
        return (content,)
    return content.images if isinstance(content, Chat) else ()


def _messages(chat: Chat) -> list[Mapping[str, object]]:
    return [
        {**message, "content": [_part(part) for part in parts]}
        if isinstance(parts := message.get("content"), tuple)
        else message
        for message in chat.messages
    ]


def _part(part: object) -> Mapping[str, object]:
    if isinstance(part, Image):
        name = {} if part.key is None else {"uuid": part.key}
        kind = "video_url" if isinstance(part, Video) else "image_url"
        return {"type": kind, kind: {"url": _source(part)}, **name}
    return {"type": "text", "text": part}


def _source(image: Image) -> str:
    """Return the URL of an image, or a data URL. The server detects the format."""
    kind = "video" if isinstance(image, Video) else "image"
    if isinstance(image.source, str):
        if not image.source.lower().startswith(_URLS):
            which = "a Video" if kind == "video" else "an Image"
            raise InvalidInput(f"The source of {which} must be the bytes of a file, or a URL.", param="input")
        return image.source
    frames = split_frames(image.source) if kind == "video" else None
    if frames is not None:
        return "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode("ascii") for frame in frames)
    return f"data:{kind}/*;base64," + base64.b64encode(image.source).decode("ascii")
