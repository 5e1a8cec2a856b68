"""How much may be inside the engine. Decided at the door for a whole request, before any work is done on it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.statistics import AdmissionStatistics
from staged_pool.stages.errors import Overloaded, TooLarge


@dataclass(slots=True)
class Room:
    """What one request takes inside; given back whole."""

    body_bytes: int
    items: int


class Admission:
    """Counts what is inside, and refuses what would exceed a limit. Never waits."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._requests = 0
        self._items = 0
        self._body_bytes = 0
        self._admitted = 0
        self._refused: Counter[str] = Counter()

    def enter(self, *, body_bytes: int, items: int = 1) -> Room:
        """Let a request in.

        Args:
            body_bytes: Size of what it sent.
            items: As many as are known yet; `count_items` corrects it once the request is decoded.

        Raises:
            Overloaded: A limit is reached; nothing was counted.
            TooLarge: The request exceeds a limit by itself.
        """
        config = self._config
        if body_bytes > config.max_bytes:
            raise TooLarge(f"The request has {body_bytes} bytes; at most {config.max_bytes} are accepted.")
        self._require("requests", self._requests + 1, config.max_requests)
        self._require("items", self._items + items, config.max_items)
        self._require("bytes", self._body_bytes + body_bytes, config.max_bytes)
        self._requests += 1
        self._items += items
        self._body_bytes += body_bytes
        self._admitted += 1
        return Room(body_bytes, items)

    def count_items(self, room: Room, items: int) -> None:
        """Correct the items of a request that is inside.

        Raises:
            TooLarge: It has more items than one request may have.
            Overloaded: All requests together would have too many.
        """
        limit = self._config.max_request_items
        if items > limit:
            raise TooLarge(f"The request has {items} inputs; at most {limit} are accepted.", param="input")
        self._require("items", self._items + items - room.items, self._config.max_items)
        self._items += items - room.items
        room.items = items

    def leave(self, room: Room) -> None:
        """Give back what `enter` took."""
        self._requests -= 1
        self._items -= room.items
        self._body_bytes -= room.body_bytes

    def _require(self, limit: str, wanted: int, allowed: int) -> None:
        if wanted > allowed:
            self._refused[limit] += 1
            raise Overloaded(f"The server is at its limit of {allowed} {limit} in flight.", retry_after_s=1.0)

    def statistics(self) -> AdmissionStatistics:
        return AdmissionStatistics(
            requests=self._requests,
            max_requests=self._config.max_requests,
            items=self._items,
            max_items=self._config.max_items,
            body_bytes=self._body_bytes,
            max_bytes=self._config.max_bytes,
            admitted=self._admitted,
            refused=dict(self._refused),
        )
