"""Reading JSON that a stranger wrote: every way in which it can be wrong becomes one `InvalidInput` with one line."""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from staged_pool.stages.errors import InvalidInput, shortened

T = TypeVar("T")

_LOCATED = re.compile(r"(?P<what>.*) - at `\$(?P<path>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")
_FIRST_INDEX = re.compile(r"[^\[]*\[(?P<index>\d+)\]")
_HALF = re.compile(rb"(?<!\\)\\u[dD][89abAB][0-9a-fA-F]{2}[^\\]")
"""The first half of a surrogate pair without the second one."""
_SHAPE = re.compile(rb"[ \t\r\n]*((?:\[[ \t\r\n]*){0,2})(.)", re.DOTALL)
_ECHOED = re.compile(r"(?P<quote>['\"])(?P<value>.*)(?P=quote)", re.DOTALL)


def decode(decoder: msgspec.json.Decoder[T], body: msgspec.Raw | bytes | bytearray, *, root: str = "") -> T:
    """Decode `body`, or say which field is wrong, what was expected there and what was found.

    Args:
        decoder: Knows the expected type.
        body: JSON text.
        root: The field that `body` is the value of; empty for a whole request.

    Raises:
        InvalidInput: `body` is not JSON, not UTF-8, nested too deeply, or not of the expected type.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error), root, decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"The body is not valid JSON: {_reason(error, body)}") from None
    except RecursionError:
        raise InvalidInput("The body is not valid JSON: it is nested too deeply") from None


def _reason(error: msgspec.DecodeError | UnicodeDecodeError, body: msgspec.Raw | bytes | bytearray) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    reason = str(error)
    # msgspec reads on for the second half, and complains of what it finds there.
    misled = "truncated" in reason or "hex escape" in reason
    if "surrogate" in reason or (misled and _HALF.search(memoryview(body))):
        return "a text in it holds half of a surrogate pair"
    return reason


def shape(raw: msgspec.Raw) -> tuple[int, bytes]:
    """Which form a value has: how many brackets open it, up to 2, and the character after them."""
    opening = _SHAPE.match(memoryview(raw))
    brackets, first = opening.groups() if opening else (b"", b"")
    return brackets.count(b"["), first


def _explain(text: str, root: str, expected: Any) -> InvalidInput:
    """Turn msgspec's message, such as ``Expected `str`, got `int` - at `$[2]` ``, into ours."""
    located = _LOCATED.fullmatch(text)
    path = (root + located["path"]).removeprefix(".") if located else root
    what = located["what"] if located else text
    if missing := _MISSING.fullmatch(what):
        path = f"{path}.{missing['field']}" if path else missing["field"]
        what = "this field is required"
    what = _ECHOED.sub(_shortened, what)
    if not path:
        return InvalidInput(f"The body is wrong: {what}")
    param = re.split(r"[.\[]", path, maxsplit=1)[0]
    if choices := _choices(expected, param):
        what = f"{what}; expected one of {choices} (literal_error)"  # what vLLM's clients look for
    index = _FIRST_INDEX.match(path)
    return InvalidInput(f"{path}: {what}", param=param, index=int(index["index"]) if index else None)


def is_null(raw: msgspec.Raw) -> bool:
    """Whether a value is null."""
    return shape(raw) == (0, b"n")


def _shortened(echoed: re.Match[str]) -> str:
    return f"'{shortened(echoed['value'])}'"


def _choices(expected: Any, field: str) -> str:
    """The values that a field of the type `expected` may have, where they can be listed."""
    hint = get_type_hints(expected).get(field) if isinstance(expected, type) else None
    literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
    return ", ".join(f"`{value}`" for literal in literals for value in get_args(literal))
