"""Images as clients name or send them: by URLs, in data URLs, in base64, and as parts of messages and documents."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

import msgspec

from staged_pool.api.wire import extract_images
from staged_pool.api.wire.data_urls import decode_base64, decode_data_url
from staged_pool.api.wire.field_errors import field_error
from staged_pool.runtime.media.urls import MAX_CHARACTERS
from staged_pool.runtime.requests import Chat, Content, Image, TextInput
from staged_pool.stages.errors import InvalidInput, UrlNotAllowed, shortened

T = TypeVar("T")

_SCHEME: Final = re.compile(rb"([A-Za-z][A-Za-z0-9+.-]*):")
_BACKGROUND: Final = "rgba_background_color"
_URLS: Final = frozenset({b"http", b"https", b"file"})


class ImageFields(msgspec.Struct, kw_only=True):
    """Fields that say how the images of a request are prepared."""

    mm_processor_kwargs: dict[str, Any] | None = None
    """Settings of the model's image processor."""
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    """By kind of media; of those for `image`, `rgba_background_color` is what lies behind transparent pixels."""

    def image_options(self) -> Mapping[str, object]:
        """See `Image.options`.

        Raises:
            InvalidInput: `rgba_background_color` is no colour. All else is for the model to judge.
        """
        options = dict(self.mm_processor_kwargs or {})
        reading = (self.media_io_kwargs or {}).get("image", {})
        if _BACKGROUND in reading:
            options[_BACKGROUND] = colour = reading[_BACKGROUND]
            if not _is_colour(colour):
                raise field_error(f"media_io_kwargs.image.{_BACKGROUND}", "expected three whole numbers from 0 to 255")
        return options


def _is_colour(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(type(part) is int and 0 <= part <= 255 for part in value)


class Part(msgspec.Struct):
    """A part of a message or of a document, with the fields of all its kinds."""

    type: str | None = None
    text: Any = None
    image_url: Any = None
    """`{"url": ...}`, or the URL."""
    image: Any = None
    """A URL, a data URL, or the image in base64."""
    uuid: Any = None
    """What the client calls the image."""

    def read(self, where: str, index: int | None, *, default: str | None = None) -> str | Image:
        """The text or the image.

        Args:
            where: The path to it, from the field on.
            index: Which input of the request it is in.
            default: Its type where it names none. None: it must.

        Raises:
            InvalidInput: It is of another type, or lacks what its type has.
        """
        kind = default if self.type is None else self.type
        match kind:
            case None:
                raise field_error(f"{where}.type", "this field is required", index)
            case "text" | "input_text":
                return self._text(where, index)
            case "image_url" | "input_image":
                given, path = self.image_url, f"{where}.image_url"
                if isinstance(given, Mapping):
                    given, path = given.get("url"), f"{path}.url"
                return self._image(given, path, index, bare=False)
            case "image":
                return self._image(self.image, f"{where}.image", index, bare=True)
            case _:
                what = f"`{shortened(kind)}` is not supported; `text`, `image_url`, `input_image` and `image` are"
                raise field_error(f"{where}.type", what, index)

    def _text(self, where: str, index: int | None) -> str:
        if self.text is None:
            raise field_error(f"{where}.text", "this field is required", index)
        if not isinstance(self.text, str):
            raise field_error(f"{where}.text", "expected a text", index)
        return self.text

    def _image(self, given: object, where: str, index: int | None, *, bare: bool) -> Image:
        if given is None:
            raise field_error(where, "this field is required", index)
        if not isinstance(given, str):
            raise field_error(where, "expected a text", index)
        if self.uuid is not None and not isinstance(self.uuid, str):
            raise field_error(f"{where.rpartition('.image')[0]}.uuid", "expected a text", index)
        return replace(read_image(given, where, index, bare=bare), key=self.uuid)


def read_image(given: str, where: str, index: int | None, *, bare: bool) -> Image:
    """An image that is named by a URL, or sent in a text.

    Args:
        given: A URL (http, https, file), which is fetched later, or a data URL. No type that it says is believed.
        where: The path to it, from the field on.
        index: Which input of the request it is.
        bare: Base64 without the head of a data URL is an image, too.

    Raises:
        InvalidInput: It is none of them, is no right base64, or is empty.
        UrlNotAllowed: It is a URL of another kind.
    """
    held = extract_images.take(given)
    if isinstance(held, bytes):
        return Image(_not_empty(held, where, index))
    if held is None:
        given = given.strip()
    characters = memoryview(given.encode(errors="replace")) if held is None else held
    scheme = _SCHEME.match(characters)
    name = scheme[1].lower() if scheme else b""
    if name in _URLS:
        if held is not None or len(given) > MAX_CHARACTERS:
            raise _bad(where, f"expected a URL of at most {MAX_CHARACTERS} characters", index)
        return Image(given)
    if name != b"data" and (scheme or not bare):
        kinds = "a URL (http, https, file or data)"
        what = f"expected {kinds}, or base64" if bare else f"expected {kinds}"
        raise _bad(where, what, index, error=UrlNotAllowed if scheme else InvalidInput)
    # What stands aside has no escapes any more: an end of a line in it is one that JSON does not allow.
    decode = decode_data_url if scheme else decode_base64
    decoded = decode(characters, in_lines=held is None)
    if decoded is None:
        like = " behind the comma of a data URL, as in data:image/png;base64,..." if scheme else ""
        raise _bad(where, f"expected base64 (RFC 4648, section 4 or 5){like}", index)
    return Image(_not_empty(decoded, where, index))


def _not_empty(data: bytes, where: str, index: int | None) -> bytes:
    if not data:
        raise _bad(where, "the image is empty", index)
    return data


def _bad(where: str, what: str, index: int | None, *, error: type[InvalidInput] = InvalidInput) -> InvalidInput:
    extract_images.report_invalid()
    return field_error(where, what, index, error=error)


def joined(parts: list[str | Image]) -> str | tuple[str | Image, ...]:
    """The content of a message: its lines, where it is texts only, for there are templates that know no parts."""
    if any(isinstance(part, Image) for part in parts):
        return tuple(parts)
    return "\n".join(part for part in parts if isinstance(part, str))


def document(parts: list[str | Image]) -> Content:
    """A query or a document of these parts: an image that is alone stays one, and is no conversation about it."""
    content = joined(parts)
    if isinstance(content, str):
        return content
    alone = content[0]
    if len(content) == 1 and isinstance(alone, Image):
        return alone
    return Chat(({"role": "user", "content": content},))


def echo(content: Content) -> dict[str, object]:
    """A query or a document in an answer: as vLLM has it, but without the images themselves.

    Returns:
        `text`: what it says, None where it is images only. `multi_modal`: the URLs of its images as parts of a
        message, None where it has none; of an image that was sent, an empty data URL.
    """
    if isinstance(content, str):
        return {"text": content, "multi_modal": None}
    images = (content,) if isinstance(content, Image) else content.images
    texts = () if isinstance(content, Image) else content.texts
    return {"text": "\n".join(texts) if texts else None, "multi_modal": [_echoed(image) for image in images]}


def plain(content: Content) -> str | None:
    """A query or a document in an answer as a text; None where it is images only."""
    text = echo(content)["text"]
    return text if isinstance(text, str) else None


def _echoed(image: Image) -> dict[str, object]:
    url = image.source if isinstance(image.source, str) else "data:,"
    part: dict[str, object] = {"type": "image_url", "image_url": {"url": url}}
    return part if image.key is None else {**part, "uuid": image.key}


def with_options(given: T, options: Mapping[str, object]) -> T:
    """The same input, query or document, with these options for each image in it."""
    changed: Any = given
    match given:
        case Image():
            changed = replace(given, options=options)
        case Chat():
            changed = given.with_images([replace(image, options=options) for image in given.images])
        case TextInput(source=Chat() as chat) if chat.images:
            changed = replace(given, source=with_options(chat, options))
    return changed if options else given
