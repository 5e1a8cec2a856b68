"""The decoder of JSON that others have written: clients, servers, files and model folders.

Every decoder recurses, so a few kilobytes of brackets end it by a `RecursionError`, wherever the stack happens to be.
Here size and depth are limited before anything is decoded, and whatever is wrong has one class of error. Only what this
program has written itself is decoded elsewhere.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from itertools import accumulate, islice
from typing import Any, Final, TypeVar, overload

from staged_pool.stages import foreign_file, foreign_text

T = TypeVar("T")
Content = bytes | bytearray | memoryview | str

MOST_DEPTH: Final = 128
"""Lists and objects inside one another that foreign JSON may have. The libraries that write JSON allow 254."""

MOST_BYTES: Final = foreign_file.MOST_BYTES
"""Bytes that foreign JSON may have, unless its reader has a limit of its own. Tokenizers have up to 40 MB."""

ANY_SIZE: Final = 2**62
"""Limit of a reader that has limited the bytes already."""

_SLICE: Final = 2**16
"""Bytes, or characters of a string, that one step looks at.

A call in C holds the interpreter's lock to its end, so it gets no more than this.
"""
_QUOTE: Final = ord('"')
_BACKSLASH: Final = ord("\\")
_NO_MARKS: Final = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""Steps of the depth at a bracket, 1 and -1, as `array("b")` reads bytes."""


class BadJson(ValueError):
    """Foreign JSON that cannot be decoded. The message names the fault and its place, and repeats no content."""


@overload
def decode(content: Content, *, most_bytes: int = ..., most_depth: int | None = ..., line: int = ...) -> Any: ...


@overload
def decode(
    content: Content, read: Callable[[Any], T], *, most_bytes: int = ..., most_depth: int | None = ..., line: int = ...
) -> T: ...


def decode(
    content: Content,
    read: Callable[[Any], Any] = json.loads,
    *,
    most_bytes: int = MOST_BYTES,
    most_depth: int | None = MOST_DEPTH,
    line: int = 1,
) -> Any:
    """Decode foreign JSON.

    Args:
        content: The JSON.
        read: Decodes it, such as the method of a decoder with types.
        most_bytes: Limit on the bytes.
        most_depth: Limit on lists and objects inside one another. None: the types of `read` bound the depth.
        line: Number of its first line in its file, from 1, for errors.

    Raises:
        BadJson: The content is too large, nested too deeply, or no JSON. Other errors of `read` pass.
    """
    if len(content) > most_bytes:
        raise BadJson(f"it has {len(content)} bytes, and {most_bytes} are allowed")
    if most_depth is not None:
        check_depth(content, most_depth, line=line)
    try:
        return read(content)
    except RecursionError:
        raise BadJson("it is nested too deeply") from None
    except json.JSONDecodeError as error:  # orjson's error is one, too
        raise BadJson(f"{error.msg}, in line {error.lineno + line - 1}, column {error.colno}") from error
    except UnicodeDecodeError as error:
        # A decoder may tell the place in one text alone. A part of a larger content has no place to tell.
        fault = ""
        if isinstance(content, bytes | bytearray | memoryview):
            fault = foreign_text.fault_of(bytes(content), line=line)
        raise BadJson(fault or "it is not UTF-8") from error


def check_depth(content: Content, most: int = MOST_DEPTH, *, line: int = 1) -> None:
    """Reject JSON that is nested too deeply. It need not be valid.

    Args:
        content: The JSON.
        most: Limit on lists and objects inside one another.
        line: Number of its first line in its file, from 1.

    Raises:
        BadJson: More than `most` lists and objects are inside one another; says where.
    """
    if not _has_more_opens(content, most):
        return
    escape, in_text, depth = b"", False, 0
    for number, part in enumerate(_slices(content)):
        # Each byte is looked at a few times, in C. A loop over the brackets in Python would take longer than decoding.
        marks = escape + part
        if has_escape := b"\\" in marks:
            marks = marks.replace(b"\\\\", b"")
            has_escape = marks.endswith(b"\\")
            marks = marks.replace(b'\\"', b"")
        # Two quotes side by side change nothing. Brackets between the others are in turn outside and inside of texts.
        texts = marks.translate(None, _NO_MARKS).replace(b'""', b"").split(b'"')
        steps = array("b", b"".join(texts[in_text::2]).translate(_STEPS))
        if max(accumulate(steps, initial=depth)) > most:
            where = _place_of(content, number, _place_in(part, bool(escape), in_text, most - depth), line)
            raise BadJson(f"it is nested too deeply: more than {most} lists and objects inside one another{where}")
        depth += sum(steps)
        escape = b"\\" if has_escape else b""
        in_text ^= len(texts) % 2 == 0


def _has_more_opens(content: Content, most: int) -> bool:
    opens = 0
    for part in _slices(content):
        opens += part.count(b"[") + part.count(b"{")
        if opens > most:
            return True
    return False


def _slices(content: Content) -> Iterator[bytes]:
    whole = content if isinstance(content, str) else memoryview(content)
    for start in range(0, len(whole), _SLICE):
        part = whole[start : start + _SLICE]
        yield part.encode("utf-8", "surrogatepass") if isinstance(part, str) else bytes(part)


def _place_in(part: bytes, is_escaped: bool, in_text: bool, most: int) -> int:
    """Return the index of the bracket in a slice that is one level too deep.

    Args:
        part: The slice, which has such a bracket.
        is_escaped: Whether a backslash stands before it.
        in_text: Whether it begins inside of a text.
        most: Levels that it may go down.
    """
    for index, byte in enumerate(part):
        if is_escaped and byte in b'"\\':
            is_escaped = False
        elif byte == _BACKSLASH:
            is_escaped = True
        else:
            is_escaped = False
            in_text ^= byte == _QUOTE
            most += 0 if in_text else (byte in b"]}") - (byte in b"[{")
            if most < 0:
                return index
    raise AssertionError("the slice has no such bracket")


def _place_of(content: Content, number: int, index: int, first_line: int) -> str:
    """Return the place of a byte in words.

    Args:
        content: All of it.
        number: Number of the slice, from 0.
        index: Index of the byte in its slice.
        first_line: Number of the first line.
    """
    line, column = first_line, 1
    for place, part in enumerate(islice(_slices(content), number + 1)):
        before = part[:index] if place == number else part
        if breaks := before.count(b"\n"):
            line, column = line + breaks, 0
        column += len(before) - (before.rfind(b"\n") if breaks else 0)
    return f", from line {line}, column {column} on"
