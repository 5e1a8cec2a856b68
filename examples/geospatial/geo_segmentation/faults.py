"""Errors that name the field of the request at fault."""

from __future__ import annotations

from staged_pool import InvalidInput


def fault(place: str, message: str, kind: type[InvalidInput] = InvalidInput) -> InvalidInput:
    """Return an error about a field.

    Args:
        place: Path of the field, such as `data.indices`.
        message: The fault and its remedy, which follow the path.
        kind: Class of the error, which decides the status over HTTP.
    """
    return kind(f"{place} {message}", param=place)
