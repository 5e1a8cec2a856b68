"""Extraction of base64 images from a request's JSON, before the JSON is decoded.

A JSON decoder holds the GIL for the whole body: 30 to 40 ms for 20 MB of base64, in which no other thread runs. So
long texts that look like base64 are cut out first, and a mark takes the place of each. They are found in blocks, a few
microseconds each. `images.read_image` takes the text of a mark. If a mark is left, it stood for another field than an
image, and the body is read again as it came. So no other reader needs to know of marks.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final, TypeAlias, TypeVar

from staged_pool.stages.errors import InvalidInput

Body: TypeAlias = bytes | bytearray
T = TypeVar("T")

BLOCK: Final = 2**14
"""Bytes without a quotation mark from which on a text may be cut out."""
SLICE: Final = 2**18
"""Bytes that are copied or searched in one step under the GIL: well below 1 ms."""

Held: TypeAlias = memoryview | bytes
"""Value of a mark: the characters of a text (memoryview), or the bytes of an image from a form."""

_FIRST: Final = re.compile(rb"[A-Za-z0-9+/_-]")
"""First character of base64 and data URLs; in JSON it cannot follow the end of a text, only its beginning."""
_ESCAPES: Final = (
    (b"\\/", b"/"), (b"\\n", b""), (b"\\r", b""), (b"\\u002B", b"+"), (b"\\u002b", b"+"), (b"\\u002F", b"/"),
    (b"\\u002f", b"/"), (b"\\u003D", b"="), (b"\\u003d", b"="),
)  # fmt: skip
"""Escapes that JSON encoders write in base64, with their meaning; line breaks are dropped. .NET escapes every `+`."""
_LONGEST_ESCAPE: Final = 6


class MarkedJson:
    """JSON of one request with marks, and the values of the marks."""

    def __init__(self) -> None:
        self._secret = ""
        self._held: dict[str, Held] = {}
        self.json: Body = b""
        self.has_invalid = False
        """An extracted image is invalid, so that reading the original body would fail, too."""

    def add(self, held: Held) -> str:
        """Store a value, and return its mark."""
        if not self._secret:  # a caller who could guess a mark could write it in another field
            self._secret = secrets.token_hex(16)
        mark = f"extracted-{self._secret}-{len(self._held)}"
        self._held[mark] = held
        return mark

    def take(self, mark: str) -> Held | None:
        """Remove and return the value of a mark; None if there is no such mark."""
        return self._held.pop(mark, None)

    def remaining(self) -> int:
        """Return the number of values that have not been taken."""
        return len(self._held)


_CURRENT: Final[ContextVar[MarkedJson | None]] = ContextVar("extracted_images", default=None)


def take(text: str) -> Held | None:
    """Remove and return the value of a mark of the current request; None if the text is no mark."""
    current = _CURRENT.get()
    return None if current is None else current.take(text)


def report_invalid() -> None:
    """Note that a value that was taken is not a valid image."""
    if (current := _CURRENT.get()) is not None:
        current.has_invalid = True


def read_json(reader: Callable[[Body], T], body: Body) -> T:
    """Call `reader` on a JSON body, with long base64 texts extracted."""
    if len(body) < BLOCK:  # most bodies: too short for a long text
        return reader(body)
    marked = extract(body)
    if not marked.remaining():
        return reader(body)
    try:
        found = read_marked(reader, marked)
    except InvalidInput:
        if marked.has_invalid:
            raise
    else:
        if not marked.remaining():
            return found
    return reader(body)


def peek(reader: Callable[[Body], T], body: Body) -> T:
    """Call `reader` on a JSON body of which it uses only short fields; long ones may be marks."""
    return reader(extract(body).json)


def read_marked(reader: Callable[[Body], T], marked: MarkedJson) -> T:
    """Call `reader` on JSON with marks, so that `take` finds their values."""
    token = _CURRENT.set(marked)
    try:
        return reader(marked.json)
    finally:
        _CURRENT.reset(token)


def extract(body: Body) -> MarkedJson:
    """Replace each long text that looks like base64 by a mark."""
    marked = MarkedJson()
    pieces: list[Body] = []
    kept = place = 0
    while place + BLOCK <= len(body):
        quote = body.rfind(b'"', place, place + BLOCK)
        if quote >= 0:
            place = quote + 1
            continue
        end = _closing_quote(body, place + BLOCK)
        held = _base64_text(body, place, end)
        if held is not None:
            pieces += (body[kept:place], marked.add(held).encode())
            kept = end
        place = end + 1
    marked.json = b"".join((*pieces, body[kept:])) if pieces else body
    return marked


def _closing_quote(body: Body, place: int) -> int:
    """Find the next quotation mark; the length of the body if there is none."""
    while place < len(body):
        found = body.find(b'"', place, place + SLICE)
        if found >= 0:
            return found
        place += SLICE
    return len(body)


def _base64_text(body: Body, start: int, end: int) -> memoryview | None:
    """Return the text between two quotation marks, unescaped; None unless it looks like base64.

    Args:
        body: JSON.
        start: Place after the first quotation mark.
        end: Place of the second one.
    """
    if start < 2 or end == len(body) or body[start - 2] == ord("\\") or body[end - 1] == ord("\\"):
        return None
    if not _FIRST.match(body, start):
        return None
    view = memoryview(body)[start:end]
    if not any(body.find(b"\\", first, min(first + SLICE, end)) >= 0 for first in range(start, end, SLICE)):
        return view
    pieces = []
    place = 0
    while place < len(view):
        until = _piece_end(view, place)
        piece = bytes(view[place:until])
        for escape, meant in _ESCAPES:
            piece = piece.replace(escape, meant)
        if b"\\" in piece:
            return None
        pieces.append(piece)
        place = until
    return memoryview(b"".join(pieces))


def _piece_end(view: memoryview, place: int) -> int:
    """Return the end of the next piece, moved so that no escape is split."""
    until = min(place + SLICE, len(view))
    first = max(place, until - _LONGEST_ESCAPE + 1)
    escape = bytes(view[first:until]).rfind(b"\\")
    if escape < 0:
        return until
    length = _LONGEST_ESCAPE if view[first + escape + 1] == ord("u") else 2  # the text ends with no backslash
    return min(max(until, first + escape + length), len(view))
