"""The reader of text that others have written: files, the standard input, and fields of forms.

Text is UTF-8. A byte order mark before it is no part of it. A line ends with a line feed, or with a carriage return
and a line feed. Whatever is wrong has the same words at every door.
"""

from __future__ import annotations

from codecs import (
    BOM_UTF8,
    BOM_UTF16_BE,
    BOM_UTF16_LE,
    BOM_UTF32_BE,
    BOM_UTF32_LE,
    utf_8_decode,
    utf_16_be_decode,
    utf_16_le_decode,
    utf_32_be_decode,
    utf_32_le_decode,
)
from collections.abc import Callable
from typing import Final
from unicodedata import category

_MARKS: Final = (
    (BOM_UTF32_LE, "UTF-32"),  # begins like the mark of UTF-16
    (BOM_UTF32_BE, "UTF-32"),
    (BOM_UTF16_LE, "UTF-16"),
    (BOM_UTF16_BE, "UTF-16"),
)
_WIDE: Final = (
    ("UTF-32", 4, utf_32_le_decode),
    ("UTF-32", 4, utf_32_be_decode),
    ("UTF-16", 2, utf_16_le_decode),
    ("UTF-16", 2, utf_16_be_decode),
)
"""Other encodings, the bytes of their units, and their decoders."""

_SEARCHED_BYTES: Final = 1024
"""Bytes in which another encoding is searched."""

_SPACES: Final = "\t\n\f\r\x1b"
_NO_TEXT: Final = frozenset({"Cc", "Cn", "Co", "Cs"})
"""Categories of characters that no text has, but for `_SPACES`."""

_CONTROLS: Final = bytes(byte for byte in range(1, 32) if chr(byte) not in _SPACES)
"""Control characters that no text has; NUL is counted apart."""


class BadText(ValueError):
    """Text that cannot be decoded. The message names the fault and its place, and repeats nothing of the text."""


def unmarked(content: bytes) -> bytes:
    """Return a text without its byte order mark.

    Args:
        content: The text, or at least its beginning.

    Raises:
        BadText: It is UTF-16 or UTF-32.
    """
    if encoding := other_encoding(content):
        raise BadText(f"it is {encoding}, but must be UTF-8")
    return content.removeprefix(BOM_UTF8)


def decoded(content: bytes, *, line: int = 1) -> str:
    """Decode a part of a text, such as a line of a file.

    Args:
        content: The part.
        line: Number of its first line in the text, from 1.

    Raises:
        BadText: It is not UTF-8; names the line, and the byte in the line, from 1.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        byte = error.start - content.rfind(b"\n", 0, error.start)
        raise BadText(f"it is not UTF-8, from byte {byte} of line {line} on") from None


def text_of(content: bytes) -> str:
    """Decode a whole text without its byte order mark.

    Raises:
        BadText: See `unmarked` and `decoded`. The mark does not count in places.
    """
    return decoded(unmarked(content))


def lines_of(content: bytes) -> list[str]:
    """Decode a whole text, and return its lines; the last one needs no end.

    Raises:
        BadText: See `text_of`.
    """
    lines = text_of(content).split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def fault_of(content: bytes, *, line: int = 1) -> str:
    """Return the fault of a text in the words of `BadText`; empty if it has none.

    Args:
        content: A whole text, or a part of one.
        line: Number of its first line in the whole text, from 1.
    """
    try:
        decoded(unmarked(content), line=line)
    except BadText as error:
        return str(error)
    return ""


def other_encoding(content: bytes) -> str:
    """Return the name of the encoding of a text that is not UTF-8; empty if none is known.

    Without a byte order mark, its NULs tell: in UTF-16 each space, line end and Latin letter has one.
    """
    for mark, encoding in _MARKS:
        if content.startswith(mark):
            return encoding
    start = content[:_SEARCHED_BYTES]
    if 0 not in start:
        return ""
    return next((name for name, width, read in _WIDE if _is_wide(start, width, read)), "")


def _is_wide(start: bytes, width: int, read: Callable[[bytes, str, bool], tuple[str, int]]) -> bool:
    """Return True for a text in units of `width` bytes, rather than in UTF-8."""
    start = start[: len(start) // width * width]
    try:
        text = read(start, "strict", False)[0]  # a character may be cut at the end
    except UnicodeDecodeError:
        return False
    if not text or any(category(char) in _NO_TEXT and char not in _SPACES for char in text):
        return False
    # A text in UTF-8 may have a NUL now and then, but no other controls.
    return 4 * start.count(0) > len(start) or _is_no_utf_8(start)


def _is_no_utf_8(start: bytes) -> bool:
    """Return True for bytes with control characters, or with which no text in UTF-8 begins."""
    if len(start.translate(None, _CONTROLS)) < len(start):
        return True
    try:
        utf_8_decode(start, "strict", False)
    except UnicodeDecodeError:
        return True
    return False
