"""Documents that are objects, with `rank_fields` to name the fields that are read (Cohere, Mixedbread)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from staged_pool.api.wire.field_errors import field_error

Fielded: TypeAlias = str | dict[str, Any]


def text_of(given: Fielded, rank_fields: Sequence[str], where: str, index: int) -> str:
    """Join the values of the named fields, a line each; a text is returned as it is.

    Args:
        given: The document.
        rank_fields: At least one name; fields that the object does not have are skipped.
        where: Path of the document in the request.
        index: Index of the document.

    Raises:
        InvalidInput: The object has none of the fields.
    """
    if isinstance(given, str):
        return given
    found = [as_text(given[name]) for name in rank_fields if given.get(name) is not None]
    if not found:
        raise field_error(where, "the object has none of the `rank_fields`", index)
    return "\n".join(found)


def texts_of(given: object, rank_fields: Sequence[str], root: str) -> list[str]:
    """Join the values of the named fields of each document; see `text_of`.

    Args:
        given: Value of the field with the documents.
        rank_fields: See `text_of`.
        root: Name of the field.

    Raises:
        InvalidInput: The value is not a list of texts and objects, or an object has none of the fields.
    """
    if not isinstance(given, list) or not all(isinstance(each, str | dict) for each in given):
        raise field_error(root, "expected a list of texts, or of objects with the `rank_fields`")
    return [text_of(each, rank_fields, f"{root}[{index}]", index) for index, each in enumerate(given)]


def labelled(given: Mapping[str, Any]) -> str:
    """Join all fields of an object, a line `name: value` each."""
    return "\n".join(f"{name}: {as_text(value)}" for name, value in given.items())


def as_text(value: object) -> str:
    """Return a text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
