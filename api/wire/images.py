"""Images and videos in requests: URLs, data URLs, base64, and parts of messages and documents."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from staged_pool.api.wire import extract_images
from staged_pool.api.wire.data_urls import decode_base64, decode_data_url, decode_frames, is_frames
from staged_pool.api.wire.field_errors import field_error
from staged_pool.runtime.media.urls import MAX_URL_CHARACTERS
from staged_pool.runtime.requests import Chat, Content, Image, TextInput, Video
from staged_pool.runtime.video_frames import MAX_FRAMES, join_frames
from staged_pool.stages.errors import InvalidInput, UrlNotAllowed, shortened

T = TypeVar("T")

_SCHEME: Final = re.compile(rb"([A-Za-z][A-Za-z0-9+.-]*):")
_BACKGROUND: Final = "rgba_background_color"
_MODE: Final = "image_mode"
_URLS: Final = frozenset({b"http", b"https", b"file"})
_NESTED: Final = ("images_kwargs", "videos_kwargs")
_OTHER_NESTED: Final = ("text_kwargs", "audio_kwargs", "common_kwargs")


class MediaOptions(NamedTuple):
    """Options of the images and of the videos of a request, see `Image.options`."""

    images: Mapping[str, object]
    videos: Mapping[str, object]


class ImageFields(msgspec.Struct, kw_only=True):
    """Fields with settings for the preprocessing of images and videos."""

    mm_processor_kwargs: dict[str, Any] | None = None
    """Settings of the model's processor of images and videos.

    Those in `images_kwargs` are for images alone, and those in `videos_kwargs` for videos alone.
    """
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    """Settings by kind of media.

    For `image`, only `rgba_background_color`: the colour behind transparent pixels. For `video`, the choice of frames.
    """

    def media_options(self) -> MediaOptions:
        """Return the options of each image and each video.

        Raises:
            InvalidInput: A setting is not supported, or stands there twice. The model checks the other options.
        """
        if not self.mm_processor_kwargs and not self.media_io_kwargs:
            return MediaOptions({}, {})
        images, videos = (_processor_options(self.mm_processor_kwargs or {}, name) for name in _NESTED)
        reading = self.media_io_kwargs or {}
        for kind in reading:
            if kind not in ("image", "video", "audio"):  # there is no sound, so its settings have no effect
                raise field_error(f"media_io_kwargs.{shortened(kind)}", "not supported; expected `image` or `video`")
        frames = reading.get("video", {})
        if frames.get("num_frames") is not None or frames.get("fps") is not None:
            videos.pop("do_sample_frames", None)  # of frames that are chosen while a video is read, all are taken
        return MediaOptions(images | _reading_options(reading.get("image", {})), videos | frames)


def _processor_options(given: Mapping[str, Any], nested: str) -> dict[str, object]:
    """Return the settings of images, or of videos."""
    for name in _OTHER_NESTED:
        if given.get(name) is not None:
            known = "expected settings of images and videos, `images_kwargs` or `videos_kwargs`"
            raise field_error(f"mm_processor_kwargs.{name}", f"not supported; {known}")
    common = {name: value for name, value in given.items() if name not in (*_NESTED, *_OTHER_NESTED)}
    own = given.get(nested)
    where = f"mm_processor_kwargs.{nested}"
    if own is None:
        return common
    if not isinstance(own, dict):
        raise field_error(where, "expected an object")
    for name in own:
        if name in common:
            raise field_error(f"{where}.{shortened(name)}", "give it once; it is in `mm_processor_kwargs`, too")
    return {**common, **own}


def _reading_options(given: Mapping[str, Any]) -> dict[str, object]:
    """Return the settings of images that `media_io_kwargs.image` holds."""
    for name in given:
        if name not in (_BACKGROUND, _MODE):
            raise field_error(f"media_io_kwargs.image.{shortened(name)}", f"not supported; expected `{_BACKGROUND}`")
    if given.get(_MODE) not in (None, "RGB"):
        raise field_error(f"media_io_kwargs.image.{_MODE}", "expected `RGB`, the colours that all models read")
    if _BACKGROUND not in given:
        return {}
    if not _is_colour(given[_BACKGROUND]):
        raise field_error(f"media_io_kwargs.image.{_BACKGROUND}", "expected three whole numbers from 0 to 255")
    return {_BACKGROUND: given[_BACKGROUND]}


def _is_colour(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(type(part) is int and 0 <= part <= 255 for part in value)


def read_image(given: str, where: str, index: int | None, *, bare: bool) -> Image:
    """Read an image from a URL, a data URL or base64.

    Args:
        given: A URL (http, https, file), which is fetched later, or a data URL. Its declared type is ignored.
        where: Path of the value, such as `input[0].image`.
        index: Index of the input that it belongs to.
        bare: Accept base64 without `data:...,` before it.

    Raises:
        InvalidInput: The value is none of these, is invalid base64, or is empty.
        UrlNotAllowed: The URL has another scheme.
    """
    return Image(_source(given, where, index, bare=bare, kind="image"))


def read_video(given: str, where: str, index: int | None, *, bare: bool) -> Video:
    """Read a video from a URL, a data URL or base64; see `read_image`.

    A data URL of the type `video/jpeg` holds ready frames, with commas between them.
    """
    return Video(_source(given, where, index, bare=bare, kind="video"))


def read_frames(given: Sequence[object], where: str, index: int | None) -> Video:
    """Read a video from its frames, which are images in base64 or as data URLs.

    Raises:
        InvalidInput: There are no frames, one of them is a URL, or see `read_image`.
    """
    found: list[bytes] = []
    for place, each in enumerate(given):
        path = f"{where}[{place}]"
        frame = _source(each, path, index, bare=True, kind="image") if isinstance(each, str) else ""
        if isinstance(frame, str):
            raise _bad(path, "expected a frame as a data URL or in base64; frames are not fetched", index)
        found.append(frame)
    if not 1 <= len(found) <= MAX_FRAMES:
        raise _bad(where, f"expected 1 to {MAX_FRAMES} frames", index)
    return Video(join_frames(found))


def _source(given: str, where: str, index: int | None, *, bare: bool, kind: Literal["image", "video"]) -> bytes | str:
    """Return the bytes of an image or a video, or its URL; see `read_image`."""
    held = extract_images.take(given)
    if isinstance(held, bytes):
        return _not_empty(held, where, index, kind)
    if held is None:
        given = given.strip()
    characters = memoryview(given.encode(errors="replace")) if held is None else held
    scheme = _SCHEME.match(characters)
    name = scheme[1].lower() if scheme else b""
    if name in _URLS:
        if held is not None or len(given) > MAX_URL_CHARACTERS:
            raise _bad(where, f"expected a URL of at most {MAX_URL_CHARACTERS} characters", index)
        return given
    if name != b"data" and (scheme or not bare):
        kinds = "a URL (http, https, file or data)"
        what = f"expected {kinds}, or base64" if bare else f"expected {kinds}"
        raise _bad(where, what, index, error=UrlNotAllowed if scheme else InvalidInput)
    if kind == "video" and is_frames(characters):
        frames = decode_frames(characters, in_lines=held is None)
        if frames is None:
            what = "expected frames in base64 with commas between them, as in data:video/jpeg;base64,...,..."
            raise _bad(where, what, index)
        return join_frames(frames)
    # The value of a mark is unescaped and without line breaks: one that is left in it is not allowed in JSON.
    decode = decode_data_url if scheme else decode_base64
    decoded = decode(characters, in_lines=held is None)
    if decoded is None:
        example = "data:image/png;base64,..." if kind == "image" else "data:video/mp4;base64,..."
        like = f" after the comma of a data URL, as in {example}" if scheme else ""
        raise _bad(where, f"expected base64 (RFC 4648, section 4 or 5){like}", index)
    return _not_empty(decoded, where, index, kind)


def _not_empty(data: bytes, where: str, index: int | None, kind: str) -> bytes:
    if not data:
        raise _bad(where, f"the {kind} is empty", index)
    return data


def _bad(where: str, what: str, index: int | None, *, error: type[InvalidInput] = InvalidInput) -> InvalidInput:
    extract_images.report_invalid()
    return field_error(where, what, index, error=error)


def echo(content: Content) -> dict[str, object]:
    """Write a query or a document in vLLM's form, without the bytes of images.

    Returns:
        `text`: its text; None if it has images only. `multi_modal`: its images as parts of a message with their URLs;
        None if it has none. An image that was not a URL has an empty data URL.
    """
    if isinstance(content, str):
        return {"text": content, "multi_modal": None}
    images = (content,) if isinstance(content, Image) else content.images
    texts = () if isinstance(content, Image) else content.texts
    return {"text": "\n".join(texts) if texts else None, "multi_modal": [_echoed(image) for image in images]}


def plain(content: Content) -> str | None:
    """Return the text of a query or a document for an answer; None if it has images only."""
    text = echo(content)["text"]
    return text if isinstance(text, str) else None


def _echoed(image: Image) -> dict[str, object]:
    url = image.source if isinstance(image.source, str) else "data:,"
    kind = "video_url" if isinstance(image, Video) else "image_url"
    part: dict[str, object] = {"type": kind, kind: {"url": url}}
    return part if image.key is None else {**part, "uuid": image.key}


def with_options(given: T, options: MediaOptions) -> T:
    """Return an input, query or document with options on its images and videos."""
    changed: Any = given
    match given:
        case Image():
            changed = replace(given, options=options.videos if isinstance(given, Video) else options.images)
        case Chat():
            changed = given.with_images([with_options(image, options) for image in given.images])
        case TextInput(source=Chat() as chat) if chat.images:
            changed = replace(given, source=with_options(chat, options))
    return changed if any(options) else given
