"""The images in a request's JSON, set aside before it is read.

A parser holds the interpreter's lock from the first byte to the last: 30 to 40 ms for 20 MB of base64, in which this
server does nothing else, whatever thread it is in. So what is long and looks like base64 is cut out of the JSON first:
found in blocks, a few microseconds each, and put back by whoever reads images. Readers see a mark in its place, and
need not know of it: a request in which one of the marks is not read as an image is read again as it came.
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
"""Bytes without a quotation mark that make a text worth a look."""
SLICE: Final = 2**18
"""Bytes that are copied or searched under the lock at once, well below a millisecond."""

Held: TypeAlias = memoryview | bytes
"""What a mark stands for: the characters of a text, or the bytes of an image that came as such."""

_FIRST: Final = re.compile(rb"[A-Za-z0-9+/_-]")
"""What base64 and data URLs begin with. No JSON has it after the end of a text, so a text begins before it."""
_ESCAPES: Final = (
    (b"\\/", b"/"), (b"\\n", b""), (b"\\r", b""), (b"\\u002B", b"+"), (b"\\u002b", b"+"), (b"\\u002F", b"/"),
    (b"\\u002f", b"/"), (b"\\u003D", b"="), (b"\\u003d", b"="),
)  # fmt: skip
"""As some writers escape base64, and break its lines: .NET's writes every `+` so."""
_LONGEST_ESCAPE: Final = 6


class MarkedJson:
    """JSON with marks in it, and what they stand for. Made for one request."""

    def __init__(self) -> None:
        self._secret = ""
        self._held: dict[str, Held] = {}
        self.json: Body = b""
        self.has_invalid = False
        """Something that was set aside is not what it should be, so reading the request as it came is of no use."""

    def add(self, held: Held) -> str:
        """The mark that stands for something."""
        if not self._secret:  # a caller who could guess it could name what another field holds
            self._secret = secrets.token_hex(16)
        mark = f"extracted-{self._secret}-{len(self._held)}"
        self._held[mark] = held
        return mark

    def take(self, mark: str) -> Held | None:
        return self._held.pop(mark, None)

    def remaining(self) -> int:
        """How much has not been taken."""
        return len(self._held)


_CURRENT: Final[ContextVar[MarkedJson | None]] = ContextVar("extracted_images", default=None)


def take(text: str) -> Held | None:
    """What stands aside for a text of the request that is being read; None if it is only itself. Once for each mark."""
    current = _CURRENT.get()
    return None if current is None else current.take(text)


def report_invalid() -> None:
    """Say that what was taken is not what it should be."""
    if (current := _CURRENT.get()) is not None:
        current.has_invalid = True


def read_json(reader: Callable[[Body], T], body: Body) -> T:
    """What `reader` makes of a JSON body."""
    if len(body) < BLOCK:  # as most are: there is nothing in it that is long
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
    """What `reader` makes of the short fields of a JSON body; the long ones may be marks."""
    return reader(extract(body).json)


def read_marked(reader: Callable[[Body], T], marked: MarkedJson) -> T:
    """What `reader` makes of JSON with marks."""
    token = _CURRENT.set(marked)
    try:
        return reader(marked.json)
    finally:
        _CURRENT.reset(token)


def extract(body: Body) -> MarkedJson:
    """Cut all long texts that look like base64 out of JSON."""
    marked = MarkedJson()
    pieces: list[Body] = []
    kept = place = 0
    while place + BLOCK <= len(body):
        quote = body.rfind(b'"', place, place + BLOCK)
        if quote >= 0:
            place = quote + 1
            continue
        end = _end(body, place + BLOCK)
        held = _held(body, place, end)
        if held is not None:
            pieces += (body[kept:place], marked.add(held).encode())
            kept = end
        place = end + 1
    marked.json = b"".join((*pieces, body[kept:])) if pieces else body
    return marked


def _end(body: Body, place: int) -> int:
    """The place of the next quotation mark; the end where there is none."""
    while place < len(body):
        found = body.find(b'"', place, place + SLICE)
        if found >= 0:
            return found
        place += SLICE
    return len(body)


def _held(body: Body, start: int, end: int) -> memoryview | None:
    """What lies between two quotation marks, its escapes undone; None unless it is a text that looks like base64.

    Args:
        body: JSON.
        start: Behind the first one.
        end: Of the second one.
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
    """The end of the next piece, in which no escape begins that ends in another one."""
    until = min(place + SLICE, len(view))
    first = max(place, until - _LONGEST_ESCAPE + 1)
    escape = bytes(view[first:until]).rfind(b"\\")
    if escape < 0:
        return until
    length = _LONGEST_ESCAPE if view[first + escape + 1] == ord("u") else 2  # the last byte of all is no backslash
    return min(max(until, first + escape + length), len(view))
