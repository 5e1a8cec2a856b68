"""Documents that are objects, of which `rank_fields` names the fields to read: Cohere's and Mixedbread's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from staged_pool.api.wire.field_errors import field_error

Fielded: TypeAlias = str | dict[str, Any]


def text_of(given: Fielded, rank_fields: Sequence[str], where: str, index: int) -> str:
    """The values of the named fields in their order, a line each; a text stands for itself.

    Args:
        given: The document.
        rank_fields: At least one name; fields that the object lacks are skipped.
        where: Path of the document in the request.
        index: Its place.

    Raises:
        InvalidInput: The object has none of the fields.
    """
    if isinstance(given, str):
        return given
    found = [said(given[name]) for name in rank_fields if given.get(name) is not None]
    if not found:
        raise field_error(where, "the object has none of the `rank_fields`", index)
    return "\n".join(found)


def texts_of(given: object, rank_fields: Sequence[str], root: str) -> list[str]:
    """As `text_of`, of each document of a list.

    Args:
        given: Value of the field.
        rank_fields: See `text_of`.
        root: Name of the field.

    Raises:
        InvalidInput: It is no list of texts and objects, or an object has none of the fields.
    """
    if not isinstance(given, list) or not all(isinstance(each, str | dict) for each in given):
        raise field_error(root, "expected a list of texts, or of objects that have the `rank_fields`")
    return [text_of(each, rank_fields, f"{root}[{index}]", index) for index, each in enumerate(given)]


def labelled(given: Mapping[str, Any]) -> str:
    """All fields of an object, a line each, behind their names."""
    return "\n".join(f"{name}: {said(value)}" for name, value in given.items())


def said(value: object) -> str:
    """A value as text: JSON of what is none."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
