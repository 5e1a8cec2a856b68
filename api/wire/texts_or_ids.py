"""Inputs that are texts or token ids, single or in lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from staged_pool.api.wire import json_decode
from staged_pool.api.wire.field_names import InputPaths
from staged_pool.stages.errors import InvalidInput, NoInputs

_TEXT: Final = msgspec.json.Decoder(str)
_TEXTS: Final = msgspec.json.Decoder(list[str])
_IDS: Final = msgspec.json.Decoder(list[int])
_ID_LISTS: Final = msgspec.json.Decoder(list[list[int]])


def texts_or_ids(raw: msgspec.Raw, root: str, *, none: str) -> Sequence[str | tuple[int, ...]]:
    """Read a `str | list[str] | list[int] | list[list[int]]` as a sequence of inputs.

    Args:
        raw: The field's value.
        root: The field's name.
        none: Error message for an empty list.

    Raises:
        InvalidInput: The value has another type.
        NoInputs: The list is empty, or has an empty list of token ids.
    """
    depth, first = json_decode.shape(raw)
    if depth == 0:
        return (json_decode.decode(_TEXT, raw, root=root),)
    if first == b'"' and depth == 1:
        return json_decode.decode(_TEXTS, raw, root=root)
    if first == b"]" and depth == 1:
        raise NoInputs(none, param=root)
    lists = id_lists(raw, root)
    for index, ids in enumerate(lists):
        if not ids:
            message = f"{root}[{index}]: a list of token ids must not be empty"
            raise NoInputs(message, param=root, index=index)
    return lists


def places_of_texts(raw: msgspec.Raw, root: str) -> InputPaths:
    """Return the paths of the inputs that `texts_or_ids` reads."""
    depth, first = json_decode.shape(raw)
    return InputPaths(root, several=depth == 2 or (depth == 1 and first == b'"'))


def id_lists(raw: msgspec.Raw, root: str) -> list[tuple[int, ...]]:
    """Read a `list[int] | list[list[int]]` as lists of token ids; see `texts_or_ids`.

    Raises:
        InvalidInput: The value has another type, or an id is negative.
        TooLarge: See `json_decode.decode`.
    """
    nested = json_decode.shape(raw)[0] == 2
    lists = (
        json_decode.decode(_ID_LISTS, raw, root=root)
        if nested
        else [json_decode.decode(_IDS, raw, root=root, counted=False)]
    )
    for index, ids in enumerate(lists):
        if ids and (lowest := min(ids)) < 0:
            place = f"{root}[{index}]: " if nested else ""
            raise InvalidInput(f"{place}Token id {lowest} is out of vocabulary", param=root, index=index)
    return [tuple(ids) for ids in lists]
