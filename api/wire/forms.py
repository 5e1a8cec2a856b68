"""Forms (multipart/form-data, RFC 7578), converted to JSON with files as images and videos.

A field of the form becomes the field of the same name. Its value is parsed as JSON if possible, otherwise it is a text.
The parts `input`, `image`, `images`, `images[]`, `video`, `videos`, `videos[]` and `file` become the inputs, in their
order. A file is never stored, and its name is ignored. In `input` and `file` it is a video if its type says so.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from staged_pool.api.wire.extract_images import MarkedJson
from staged_pool.api.wire.json_bounds import UNLIMITED, BodyLimits, check_bounds
from staged_pool.stages import foreign_json, foreign_text
from staged_pool.stages.errors import InvalidInput, TooLarge, shortened

MAX_PARTS: Final = 1000
MAX_BOUNDARY: Final = 70
"""Maximum characters of a boundary (RFC 2046, section 5.1.1)."""
SLICE: Final = 2**16
"""Bytes that are parsed in one step."""

_IMAGES: Final = frozenset({"image", "images", "images[]", "file"})
_VIDEOS: Final = frozenset({"video", "videos", "videos[]"})
_INPUTS: Final = _IMAGES | _VIDEOS | {"input"}
_OPENS_JSON: Final = ("[", "{", '"')

logging.getLogger("python_multipart").addHandler(logging.NullHandler())  # it logs a warning for malformed forms


def boundary_of(content_type: bytes) -> bytes:
    """Return the boundary between the parts of a form.

    Raises:
        InvalidInput: The header has no boundary, or one of more than `MAX_BOUNDARY` characters.
    """
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not 1 <= len(boundary) <= MAX_BOUNDARY:
        message = f"Content-Type: a form needs a boundary of 1 to {MAX_BOUNDARY} characters"
        raise InvalidInput(message, param="Content-Type")
    return boundary


def read_form(body: bytes | bytearray, boundary: bytes, limits: BodyLimits = UNLIMITED) -> MarkedJson:
    """Convert a form to JSON with marks for its files.

    Raises:
        InvalidInput: The body is not a form, or a field is wrong.
        TooLarge: The form has more than `MAX_PARTS` parts, or a part exceeds the limits.
    """
    parts = _Parts()
    parser = MultipartParser(boundary, parts.callbacks())
    view = memoryview(body)
    try:
        for first in range(0, len(view), SLICE):
            parser.write(bytes(view[first : first + SLICE]))
    except FormParserError:
        raise not_a_form("a part or its headers are malformed or too long") from None
    if not parts.ended:
        raise not_a_form("it ends before its last boundary")
    for part in parts.found:
        check_bounds(b"".join(part.data), limits)
    return _as_json(parts.found)


class _Part:
    __slots__ = ("data", "header", "headers", "value")

    def __init__(self) -> None:
        self.header = b""
        self.value = b""
        self.headers: dict[bytes, bytes] = {}
        self.data: list[bytes] = []


class _Parts:
    """Collector of the parts that the parser finds."""

    def __init__(self) -> None:
        self.found: list[_Part] = []
        self.ended = False

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header,
            "on_header_value": self._value,
            "on_header_end": self._header_end,
            "on_part_data": self._data,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.found) == MAX_PARTS:
            raise TooLarge(f"The form has more than {MAX_PARTS} parts")
        self.found.append(_Part())

    def _header(self, data: bytes, start: int, end: int) -> None:
        self.found[-1].header += data[start:end]

    def _value(self, data: bytes, start: int, end: int) -> None:
        self.found[-1].value += data[start:end]

    def _header_end(self) -> None:
        part = self.found[-1]
        part.headers[part.header.strip().lower()] = part.value
        part.header = part.value = b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        self.found[-1].data.append(data[start:end])

    def _end(self) -> None:
        self.ended = True


def _as_json(parts: list[_Part]) -> MarkedJson:
    marked = MarkedJson()
    fields: dict[str, object] = {}
    inputs: list[object] = []
    for part in parts:
        kind, options = parse_options_header(part.headers.get(b"content-disposition", b""))
        if kind.lower() != b"form-data" or b"name" not in options:
            raise not_a_form("a part has no name")
        name = form_text(options[b"name"], "the name of a part")
        data = b"".join(part.data)  # releases the GIL if it is large
        is_file = b"filename" in options
        if is_file and name in _INPUTS:
            inputs.append({"video" if _is_video(name, part) else "image": marked.add(data)})
        elif is_file:
            known = ", ".join(sorted(_INPUTS))
            raise InvalidInput(f"{shortened(name)}: files are read in the fields {known}", param=shortened(name))
        elif name in _IMAGES | _VIDEOS:  # a URL or base64; or the image itself, from clients that send no file name
            media = "video" if name in _VIDEOS else "image"
            inputs.append({media: data.decode() if _is_text(data) else marked.add(data)})
        elif name == "input":
            value = _input(form_text(data, name))
            inputs += value if isinstance(value, list) else [value]
        elif name in fields:
            raise InvalidInput(f"{shortened(name)}: this field is in the form twice", param=shortened(name))
        else:
            fields[name] = _value(form_text(data, name))
    if inputs:
        fields["input"] = inputs
    marked.json = msgspec.json.encode(fields)
    return marked


def _is_video(name: str, part: _Part) -> bool:
    """Return True for the file of a video, by its field or its type."""
    if name in _VIDEOS:
        return True
    return name in ("file", "input") and part.headers.get(b"content-type", b"").strip().lower().startswith(b"video/")


def _is_text(data: bytes) -> bool:
    """Return True for UTF-8 text; the first bytes of every image format have control characters."""
    if any(byte < 0x20 and byte not in b"\t\r\n" for byte in data[:64]):
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def form_text(data: bytes, where: str) -> str:
    """Decode a field of a form; it may come from a file, so a byte order mark before it is left out.

    Args:
        data: Its bytes.
        where: Its name.

    Raises:
        InvalidInput: It is not UTF-8.
    """
    try:
        return foreign_text.text_of(data)
    except foreign_text.BadText as error:
        raise InvalidInput(f"{shortened(where)}: expected UTF-8: {error}", param=shortened(where)) from None


def _input(text: str) -> object:
    """Parse an input; a text that only begins like JSON stays a text."""
    return _value(text) if text.lstrip().startswith(_OPENS_JSON) else text


def _value(text: str) -> object:
    try:
        return foreign_json.decode(text, msgspec.json.decode)
    except (msgspec.DecodeError, foreign_json.BadJson):
        return text


def not_a_form(why: str) -> InvalidInput:
    """Return the error of a body that is no form."""
    return InvalidInput(f"The body is not valid multipart/form-data: {why}")
