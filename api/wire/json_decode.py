"""Decoding of untrusted JSON: every error becomes an `InvalidInput` with a message of one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from types import UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from staged_pool.stages import foreign_json, foreign_text
from staged_pool.stages.errors import InvalidInput, TooLarge, shortened

T = TypeVar("T")

_LOCATED = re.compile(r"(?P<what>.*) - at `\$(?P<path>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")
_FIRST_INDEX = re.compile(r"[^\[]*\[(?P<index>\d+)\]")
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_HALF = re.compile(rb"(?<!\\)\\u[dD][89abAB][0-9a-fA-F]{2}(?:[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])", re.DOTALL)
"""First half of a surrogate pair without the second one; a text that is cut off there is another fault."""
_SHAPE = re.compile(rb"[ \t\r\n]*((?:\[[ \t\r\n]*){0,2})(.)", re.DOTALL)
_MESSAGE_END: Final = 1024
"""Characters that are kept of either end of a msgspec message."""

_START_BYTES: Final = 4096
"""Bytes from which the encoding of a body is told."""

_STEP = re.compile(r"\.?([^.\[]+)|(\[[^\]]*\])")
_ECHOED = re.compile(r"(?P<quote>['\"])(?P<value>.*)(?P=quote)", re.DOTALL)

INPUTS: Final = frozenset({
    "input", "inputs", "texts", "images", "documents", "queries", "items", "passages", "messages", "ids",
    "data_1", "data_2", "text_1", "text_2",
})  # fmt: skip
"""Fields that are lists of inputs: an error in one of their entries has the entry's index."""


_MOST_ITEMS: Final[ContextVar[int | None]] = ContextVar("most_items", default=None)


@contextmanager
def at_most(items: int) -> Iterator[None]:
    """Limit the inputs of lists that `decode` reads in the block.

    A longer list is rejected before its inputs are converted.
    """
    token = _MOST_ITEMS.set(items)
    try:
        yield
    finally:
        _MOST_ITEMS.reset(token)


def decode(
    decoder: msgspec.json.Decoder[T],
    body: msgspec.Raw | bytes | bytearray,
    *,
    root: str = "",
    single: bool = False,
    counted: bool = True,
    most_depth: int | None = None,
) -> T:
    """Decode JSON; an error names the field, the expected type and the value found.

    Args:
        decoder: Decoder of the expected type.
        body: JSON text.
        root: The field that has `body` as its value; empty for a whole request.
        single: The value is one input, even if it is a list.
        counted: A list has an entry for each input. False: a list is one input, but errors still have an index.
        most_depth: Limit on lists and objects inside one another, for bodies of any value. None: types bound them.

    Raises:
        InvalidInput: `body` is not JSON, not UTF-8, nested too deeply, or not of the expected type.
        TooLarge: A list has more inputs than `at_most` allows.
    """
    try:
        value = foreign_json.decode(body, decoder.decode, most_bytes=foreign_json.ANY_SIZE, most_depth=most_depth)
    except msgspec.ValidationError as error:
        raise _explain(str(error), root, decoder.type, single=single) from None
    except msgspec.DecodeError as error:
        raise InvalidInput(f"The body is not valid JSON: {reason(error, body)}") from None
    except foreign_json.BadJson as error:
        raise InvalidInput(f"The body is not valid JSON: {error}") from None
    if counted and not single:
        _check_items(value, root)
    return value


def _check_items(value: object, root: str) -> None:
    """Reject too many inputs in `value`, or in one of its fields that `INPUTS` names."""
    most = _MOST_ITEMS.get()
    if most is None:
        return
    for name in (root,) if root else INPUTS:
        inputs = value if root else getattr(value, name, None)
        if isinstance(inputs, list) and len(inputs) > most:
            message = f"The request has {len(inputs)} inputs; at most {most} are accepted."
            raise TooLarge(message, param=name)


def reason(error: msgspec.DecodeError, body: msgspec.Raw | bytes | bytearray) -> str:
    """Return why a text is no JSON, where msgspec's own words mislead."""
    if encoding := foreign_text.other_encoding(bytes(memoryview(body)[:_START_BYTES])):
        return f"it is {encoding}, but must be UTF-8"
    why = str(error)
    # msgspec looks for the second half of a surrogate pair, and reports the error it finds there.
    misled = "truncated" in why or "hex escape" in why
    if "surrogate" in why or (misled and _HALF.search(memoryview(body))):
        return "a text in it holds half of a surrogate pair"
    return why


def shape(raw: msgspec.Raw) -> tuple[int, bytes]:
    """Count the brackets that open a value, up to 2; return also the character after them."""
    opening = _SHAPE.match(memoryview(raw))
    brackets, first = opening.groups() if opening else (b"", b"")
    return brackets.count(b"["), first


def _explain(text: str, root: str, expected: Any, *, single: bool) -> InvalidInput:
    """Convert msgspec's message, such as ``Expected `str`, got `int` - at `$[2]` ``.

    The message may repeat an invalid value of megabytes, so its middle is cut out.
    """
    if len(text) > 2 * _MESSAGE_END:
        text = f"{text[:_MESSAGE_END]}{text[-_MESSAGE_END:]}"
    located = _LOCATED.fullmatch(text)
    path = (root + located["path"]).removeprefix(".") if located else root
    what = located["what"] if located else text
    if missing := _MISSING.fullmatch(what):
        path = f"{path}.{missing['field']}" if path else missing["field"]
        what = "this field is required"
    choices = _choices(expected, path.removeprefix(root))
    path = path.replace("[...]", ".*")  # msgspec's notation for any entry of an object
    what = _ECHOED.sub(_shortened, what)
    if not path:
        return InvalidInput(f"The body is wrong: {what}")
    param = re.split(r"[.\[]", path, maxsplit=1)[0]
    if choices:
        what = f"{what}; expected one of {choices} (literal_error)"  # vLLM's clients look for this word
    index = None if single or param not in INPUTS else _FIRST_INDEX.match(path)
    return InvalidInput(f"{path}: {what}", param=param, index=int(index["index"]) if index else None)


def given_fields(raw: msgspec.Raw | bytes | bytearray) -> dict[str, msgspec.Raw]:
    """Return the fields of an object that are not null; clients send null for fields that they leave out.

    Raises:
        InvalidInput: The value is not a JSON object.
    """
    return {name: value for name, value in fields_of(raw).items() if not is_null(value)}


def fields_of(raw: msgspec.Raw | bytes | bytearray) -> dict[str, msgspec.Raw]:
    """Return all fields of an object.

    Raises:
        InvalidInput: The value is not a JSON object.
    """
    return decode(_FIELDS, raw)


def is_null(raw: msgspec.Raw) -> bool:
    """Return True if a value is null."""
    return shape(raw) == (0, b"n")


def _shortened(echoed: re.Match[str]) -> str:
    return f"'{shortened(echoed['value'])}'"


def _choices(expected: Any, path: str) -> str:
    """List the values allowed at a path of the type `expected`; empty if it is no enumeration."""
    hints = list(_options(expected))
    for name, place in _STEP.findall(path):
        hints = [option for hint in hints for option in _inner(hint, name if not place else None)]
    return ", ".join(f"`{value}`" for hint in hints for value in _values(hint))


def _inner(hint: Any, name: str | None) -> Iterator[Any]:
    """Yield the types of a field of a type; name None: of the entries of a list or mapping."""
    if name is None:
        yield from _options(*get_args(hint)[-1:])
    elif isinstance(hint, type) and issubclass(hint, msgspec.Struct) and name in hint.__struct_fields__:
        yield from _options(get_type_hints(hint)[name])


def _options(*hints: Any) -> Iterator[Any]:
    """Yield each type, and each member of a union."""
    for hint in hints:
        if get_origin(hint) in (Union, UnionType):
            yield from _options(*get_args(hint))
        else:
            yield hint


def _values(hint: Any) -> Iterator[object]:
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    elif isinstance(hint, type) and issubclass(hint, Enum):
        yield from (member.value for member in hint)
