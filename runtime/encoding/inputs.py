"""Inputs of `encode` and `predict`: one or a list, as sentence-transformers tells them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from staged_pool.runtime.requests import Chat, Content, Image
from staged_pool.stages.errors import InvalidArgument

Pairs: TypeAlias = Sequence[str] | Sequence[Sequence[str]]
"""A pair of a query and a document, or a list of pairs."""


def listed(inputs: object) -> tuple[list[Content], bool]:
    """Return the inputs of `encode`, and True if one was given without a list.

    Raises:
        InvalidArgument: They are neither an input nor a list of inputs.
    """
    if isinstance(inputs, str | Image | Chat):
        return [inputs], True
    found: list[Content] = []
    for index, given in enumerate(_items(inputs, "a text, an Image or a Chat, or a list of these")):
        if not isinstance(given, str | Image | Chat):
            message = f"inputs[{index}] must be a text, an Image or a Chat, not of type {type(given).__name__}."
            raise InvalidArgument(message, param="input", index=index)
        found.append(given)
    return found, False


def listed_pairs(inputs: object) -> tuple[list[tuple[str, str]], bool]:
    """Return the pairs of `predict`, and True if one was given without a list.

    Raises:
        InvalidArgument: They are neither a pair of texts nor a list of pairs.
    """
    each = _items(inputs, "a pair of texts, or a list of pairs")
    is_single = bool(each) and isinstance(each[0], str)
    found: list[tuple[str, str]] = []
    for index, pair in enumerate([each] if is_single else each):
        match pair:
            case [str(query), str(document)]:
                found.append((query, document))
            case _:
                message = f"inputs[{index}] must be a pair of two texts, such as (query, document)."
                raise InvalidArgument(message, param="input", index=index)
    return found, is_single


def _items(inputs: object, wanted: str) -> list[object]:
    if isinstance(inputs, np.ndarray) and inputs.ndim and inputs.dtype.kind in "UO":
        return list(inputs.tolist())
    if isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes | bytearray):
        return list(inputs)
    raise InvalidArgument(f"inputs must be {wanted}, not of type {type(inputs).__name__}.", param="input")
