"""Parts of messages, documents and inputs: a text, an image or a video each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.images import read_frames, read_image, read_video
from staged_pool.runtime.requests import Chat, Content, Image
from staged_pool.stages.errors import shortened

FIELDS: Final = ("image_url", "image", "video_url", "video", "text")
"""Fields that hold the content of a part, in the order of reading.

Images stand before the text, as models of both are trained, and as SGLang puts them.
"""

_URL_FIELDS: Final = {"image_url": "image_url", "input_image": "image_url", "video_url": "video_url"}
"""Types of parts whose field is a URL or `{"url": ...}`."""


class ContentPart(msgspec.Struct):
    """Part of a message or a document, with the fields of all types of parts.

    Without a `type` it is what its fields are: a text, an image, a video, or several of them.
    """

    type: str | None = None
    text: Any = None
    image_url: Any = None
    """`{"url": ...}`, or the URL."""
    image: Any = None
    """A URL, a data URL, or the image in base64."""
    video_url: Any = None
    """`{"url": ...}`, or the URL."""
    video: Any = None
    """A URL, a data URL, the video in base64, or a list of frames."""
    uuid: Any = None
    """The client's name of the image or the video."""
    source: Any = None
    """Rejected: Anthropic's form of an image. Send `image`."""
    file_id: Any = None
    """Rejected: OpenAI's name of an uploaded file. Send `image_url`."""

    @property
    def given(self) -> list[str]:
        """Names of the fields with content, in the order of `FIELDS`."""
        return [name for name in FIELDS if getattr(self, name) is not None]

    def read(self, where: str, index: int | None, *, default: str = "text") -> list[str | Image]:
        """Return the text, the image or the video of the part; without a type, all that it has.

        Args:
            where: Path of the part, such as `messages[0].content[1]`.
            index: Index of the input that it belongs to.
            default: Field that an empty part lacks, for the error.

        Raises:
            InvalidInput: The type is unknown, or the field of the type is missing or wrong.
        """
        if self.type is not None:
            return [self._typed(self.type, where, index)]
        given = self.given
        for first, second in (("image_url", "image"), ("video_url", "video")):
            if first in given and second in given:
                raise field_error(where, f"expected either `{first}` or `{second}`, or a `type`", index)
        if len(given) > 1 and self.text == "":
            given.remove("text")
        return [self._typed(kind, where, index) for kind in given or [default]]

    def _typed(self, kind: str, where: str, index: int | None) -> str | Image:
        match kind:
            case "text" | "input_text":
                return self._text(where, index)
            case "image" | "video":
                return self._image(getattr(self, kind), f"{where}.{kind}", where, index, bare=True)
            case "image_url" | "input_image" | "video_url":
                name = _URL_FIELDS[kind]
                given, path = getattr(self, name), f"{where}.{name}"
                if isinstance(given, Mapping):
                    given, path = given.get("url"), f"{path}.url"
                return self._image(given, path, where, index, bare=False)
            case _:
                known = "`text`, `input_text`, `image_url`, `input_image`, `image`, `video_url` and `video` are"
                what = f"`{shortened(kind)}` is not supported; {known}"
                raise field_error(f"{where}.type", what, index)

    def _text(self, where: str, index: int | None) -> str:
        if self.text is None:
            raise field_error(f"{where}.text", "this field is required", index)
        if not isinstance(self.text, str):
            raise field_error(f"{where}.text", "expected a text", index)
        return self.text

    def _image(self, given: object, path: str, where: str, index: int | None, *, bare: bool) -> Image:
        moving = path.startswith(f"{where}.video")
        if given is None:
            self._reject_substitutes(path, where, index)
            raise field_error(path, "this field is required", index)
        if not isinstance(given, str) and not (moving and bare and isinstance(given, list)):
            what = "expected a text or a list of frames" if moving and bare else "expected a text"
            raise field_error(path, what, index)
        if self.uuid is not None and not isinstance(self.uuid, str):
            raise field_error(f"{where}.uuid", "expected a text", index)
        if isinstance(given, list):
            return replace(read_frames(given, path, index), key=self.uuid)
        read = read_video if moving else read_image
        return replace(read(given, path, index, bare=bare), key=self.uuid)

    def _reject_substitutes(self, path: str, where: str, index: int | None) -> None:
        """Reject what other servers take instead of the image or the video."""
        if self.source is not None:
            what = "Anthropic's form is not read; expected `image` with a URL, a data URL or base64"
            raise field_error(f"{where}.source", what, index)
        if self.file_id is not None:
            what = "uploaded files are not read; expected `image_url` with a URL or a data URL"
            raise field_error(f"{where}.file_id", what, index)
        if self.uuid is not None:
            what = "this field is required: nothing is kept under a `uuid`, so send the data each time"
            raise field_error(path, what, index)


def read_parts(parts: Iterable[ContentPart], where: str, index: int | None) -> list[str | Image]:
    """Return the texts, images and videos of parts in their order; see `ContentPart.read`."""
    return [each for place, part in enumerate(parts) for each in part.read(f"{where}[{place}]", index)]


def joined(parts: list[str | Image]) -> str | tuple[str | Image, ...]:
    """Join the parts of a message; texts only become one text, because some templates know no parts."""
    if any(isinstance(part, Image) for part in parts):
        return tuple(parts)
    return "\n".join(part for part in parts if isinstance(part, str))


def document(parts: list[str | Image]) -> Content:
    """Make a query or a document of parts; a single image stays an image, without a conversation around it."""
    content = joined(parts)
    if isinstance(content, str):
        return content
    alone = content[0]
    if len(content) == 1 and isinstance(alone, Image):
        return alone
    return Chat(({"role": "user", "content": content},))
