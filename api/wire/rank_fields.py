"""Documents that are objects, of which `rank_fields` names the fields to read: Cohere's and Mixedbread's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from staged_pool.api.wire.refusals import wrong

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
        raise wrong(where, "the object has none of the `rank_fields`", index)
    return "\n".join(found)


def labelled(given: Mapping[str, Any]) -> str:
    """All fields of an object, a line each, behind their names."""
    return "\n".join(f"{name}: {said(value)}" for name, value in given.items())


def said(value: object) -> str:
    """A value as text: JSON of what is none."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
