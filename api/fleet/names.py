"""Names of the processes of a server."""

from __future__ import annotations

from typing import Final

ENGINE: Final = "engine"


def front(number: int) -> str:
    """Return the name of a front, counted from 1."""
    return f"front-{number}"
