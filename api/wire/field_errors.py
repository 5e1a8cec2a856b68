"""The error for an invalid field of a request."""

from __future__ import annotations

import re

from staged_pool.stages.errors import InvalidInput


def field_error(
    where: str, what: str, index: int | None = None, *, error: type[InvalidInput] = InvalidInput
) -> InvalidInput:
    """Return the error for an invalid value.

    Args:
        where: Path of the value, such as `messages[0].role`.
        what: The problem, and what would be right.
        index: Index of the input that the value belongs to.
        error: Class of the error.
    """
    return error(f"{where}: {what}", param=re.split(r"[.\[]", where, maxsplit=1)[0], index=index)
