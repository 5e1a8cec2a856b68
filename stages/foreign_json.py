"""The decoder of JSON that others have written: clients, servers, files and model folders.

Every decoder recurses, so a few kilobytes of brackets end it by a `RecursionError`, wherever the stack happens to be.
Here size and depth are limited before anything is decoded, and whatever is wrong has one class of error. Only what this
program has written itself is decoded elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar, overload

from staged_pool.stages import foreign_text

T = TypeVar("T")
Content = bytes | bytearray | memoryview | str

MOST_DEPTH: Final = 128
"""Lists and objects inside one another that foreign JSON may have. The libraries that write JSON allow 254."""

MOST_BYTES: Final = 256 * 2**20
"""Bytes that foreign JSON may have, unless its reader has a limit of its own. Tokenizers have up to 40 MB."""

ANY_SIZE: Final = 2**62
"""Limit of a reader that has limited the bytes already."""

_ESCAPED: Final = re.compile(rb'\\["\\]')
_TEXT: Final = re.compile(rb'"[^"]*"')
_MARK: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_SEARCHED_BYTES: Final = 2**20
"""Bytes in which the place of a fault is searched."""
_NO_MARKS: Final = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_AS_LISTS: Final = bytes.maketrans(b"{}", b"[]")


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
    check_size(len(content), most_bytes)
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


def check_size(size: int, most_bytes: int = MOST_BYTES) -> None:
    """Reject JSON of too many bytes, such as a file that is not read yet.

    Raises:
        BadJson: There are more than `most_bytes`.
    """
    if size > most_bytes:
        raise BadJson(f"it has {size} bytes, and {most_bytes} are allowed")


def check_depth(content: Content, most: int = MOST_DEPTH, *, line: int = 1) -> None:
    """Reject JSON that is nested too deeply. It need not be valid.

    Args:
        content: The JSON.
        most: Limit on lists and objects inside one another.
        line: Number of its first line in its file, from 1.

    Raises:
        BadJson: More than `most` lists and objects are inside one another; says where.
    """
    whole = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else bytes(content)
    if whole.count(b"[") + whole.count(b"{") <= most:
        return
    # All of this runs in C: a loop over the brackets of a tokenizer would take as long as decoding it.
    marks = (_ESCAPED.sub(b"", whole) if b"\\" in whole else whole).translate(None, _NO_MARKS)
    brackets = _TEXT.sub(b"", marks).translate(_AS_LISTS)
    rounds = 0
    while rounds < most and len(fewer := brackets.replace(b"[]", b"")) < len(brackets):
        brackets, rounds = fewer, rounds + 1  # each round takes away the innermost level
    if (left := brackets.count(b"[")) and left + rounds > most:
        where = _place_of(whole[:_SEARCHED_BYTES], most, line)
        raise BadJson(f"it is nested too deeply: more than {most} lists and objects inside one another{where}")


def _place_of(content: bytes, most: int, first_line: int) -> str:
    """Return the place of the bracket that is one level too deep; empty if the content has none."""
    depth = 0
    for mark in _MARK.finditer(content):
        depth += mark[0] in (b"[", b"{")
        depth -= mark[0] in (b"]", b"}")
        if depth > most:
            at = mark.start()
            line, column = content.count(b"\n", 0, at) + first_line, at - content.rfind(b"\n", 0, at)
            return f", from line {line}, column {column} on"
    return ""
