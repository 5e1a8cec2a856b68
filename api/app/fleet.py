"""The other processes of a server, as one of its fronts sees them."""

from __future__ import annotations

from typing import Literal, Protocol


class Fleet(Protocol):
    """Reports on all processes of a server."""

    async def report(self, name: Literal["metrics", "stages"]) -> bytes:
        """Return the body of `/metrics` or `/stages`.

        Raises:
            EngineStopped: The supervisor does not answer.
        """
        ...
