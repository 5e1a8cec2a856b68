"""Reading JSON that a stranger wrote: every way in which it can be wrong becomes one `InvalidInput` with one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from types import UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from staged_pool.stages.errors import InvalidInput, TooLarge, shortened

T = TypeVar("T")

_LOCATED = re.compile(r"(?P<what>.*) - at `\$(?P<path>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")
_FIRST_INDEX = re.compile(r"[^\[]*\[(?P<index>\d+)\]")
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_HALF = re.compile(rb"(?<!\\)\\u[dD][89abAB][0-9a-fA-F]{2}[^\\]")
"""The first half of a surrogate pair without the second one."""
_SHAPE = re.compile(rb"[ \t\r\n]*((?:\[[ \t\r\n]*){0,2})(.)", re.DOTALL)
_MOST_SAID: Final = 1024
"""Characters of either end of a message of msgspec's."""

_STEP = re.compile(r"\.?([^.\[]+)|(\[[^\]]*\])")
_ECHOED = re.compile(r"(?P<quote>['\"])(?P<value>.*)(?P=quote)", re.DOTALL)

INPUTS: Final = frozenset({
    "input", "inputs", "texts", "images", "documents", "queries", "items", "passages", "messages", "ids",
    "data_1", "data_2", "text_1", "text_2",
})  # fmt: skip
"""Fields whose lists have an entry for each input of a request: an error in one carries the place as its index."""


_MOST_ITEMS: Final[ContextVar[int | None]] = ContextVar("most_items", default=None)


@contextmanager
def at_most(items: int) -> Iterator[None]:
    """Reject lists of more inputs in the block as soon as they are read, before anything is made of each."""
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
) -> T:
    """Decode `body`, or say which field is wrong, what was expected there and what was found.

    Args:
        decoder: Knows the expected type.
        body: JSON text.
        root: The field that `body` is the value of; empty for a whole request.
        single: The value is one input, also where it is a list.
        counted: A list has an entry for each input. False: it is one input, whose errors have an index all the same.

    Raises:
        InvalidInput: `body` is not JSON, not UTF-8, nested too deeply, or not of the expected type.
        TooLarge: There are more inputs than a request may have, see `at_most`.
    """
    try:
        value = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error), root, decoder.type, single=single) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"The body is not valid JSON: {_reason(error, body)}") from None
    except RecursionError:
        raise InvalidInput("The body is not valid JSON: it is nested too deeply") from None
    if counted and not single:
        _check_items(value, root)
    return value


def _check_items(value: object, root: str) -> None:
    """Reject a list of too many inputs: `value` itself, or in one of its fields that are named in `INPUTS`."""
    most = _MOST_ITEMS.get()
    if most is None:
        return
    named = ((root, value),) if root else ((name, getattr(value, name, None)) for name in INPUTS)
    for name, inputs in named:
        if isinstance(inputs, list) and len(inputs) > most:
            message = f"The request has {len(inputs)} inputs; at most {most} are accepted."
            raise TooLarge(message, param=name)


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


def _explain(text: str, root: str, expected: Any, *, single: bool) -> InvalidInput:
    """Turn msgspec's message, such as ``Expected `str`, got `int` - at `$[2]` ``, into ours.

    It repeats a value that should be one of a few, which may be megabytes: the middle of it is left out.
    """
    if len(text) > 2 * _MOST_SAID:
        text = f"{text[:_MOST_SAID]}{text[-_MOST_SAID:]}"
    located = _LOCATED.fullmatch(text)
    path = (root + located["path"]).removeprefix(".") if located else root
    what = located["what"] if located else text
    if missing := _MISSING.fullmatch(what):
        path = f"{path}.{missing['field']}" if path else missing["field"]
        what = "this field is required"
    choices = _choices(expected, path.removeprefix(root))
    path = path.replace("[...]", ".*")  # msgspec's sign for any entry of an object
    what = _ECHOED.sub(_shortened, what)
    if not path:
        return InvalidInput(f"The body is wrong: {what}")
    param = re.split(r"[.\[]", path, maxsplit=1)[0]
    if choices:
        what = f"{what}; expected one of {choices} (literal_error)"  # what vLLM's clients look for
    index = None if single or param not in INPUTS else _FIRST_INDEX.match(path)
    return InvalidInput(f"{path}: {what}", param=param, index=int(index["index"]) if index else None)


def given_fields(raw: msgspec.Raw | bytes | bytearray) -> dict[str, msgspec.Raw]:
    """The fields of an object that are not null, which clients write for what they leave out.

    Raises:
        InvalidInput: It is no JSON, or no object.
    """
    return {name: value for name, value in fields_of(raw).items() if not is_null(value)}


def fields_of(raw: msgspec.Raw | bytes | bytearray) -> dict[str, msgspec.Raw]:
    """All fields of an object.

    Raises:
        InvalidInput: It is no JSON, or no object.
    """
    return decode(_FIELDS, raw)


def is_null(raw: msgspec.Raw) -> bool:
    """Whether a value is null."""
    return shape(raw) == (0, b"n")


def _shortened(echoed: re.Match[str]) -> str:
    return f"'{shortened(echoed['value'])}'"


def _choices(expected: Any, path: str) -> str:
    """The values that may stand at a path of a value of the type `expected`, where they can be listed."""
    hints = list(_options(expected))
    for name, place in _STEP.findall(path):
        hints = [option for hint in hints for option in _inner(hint, name if not place else None)]
    return ", ".join(f"`{value}`" for hint in hints for value in _values(hint))


def _inner(hint: Any, name: str | None) -> Iterator[Any]:
    """The types of a field of a type; None: of the entries of a list or a mapping."""
    if name is None:
        yield from _options(*get_args(hint)[-1:])
    elif isinstance(hint, type) and issubclass(hint, msgspec.Struct) and name in hint.__struct_fields__:
        yield from _options(get_type_hints(hint)[name])


def _options(*hints: Any) -> Iterator[Any]:
    """Each type of a union."""
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
