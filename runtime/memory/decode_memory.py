"""Memory of image decodes, for which threads wait in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class DecodeMemory:
    """Memory of image decodes. Thread-safe: threads wait in order until their decodes fit.

    A decode that is alone always fits. So a small limit makes decodes run one by one, and blocks none for ever.

    Args:
        limit_bytes: Limit of all decodes together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lent_bytes = 0
        self._held_bytes = 0
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @property
    def limit_bytes(self) -> int:
        return self._limit_bytes

    @property
    def most_bytes(self) -> int:
        """See `ByteAccount.most_bytes`."""
        return self._limit_bytes + self._lent_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the running decodes."""
        return self._held_bytes

    def resize(self, limit_bytes: int, lent_bytes: int = 0) -> None:
        """Change the limit, and wake the waiting threads; see `MemoryBudget.resize`."""
        with self._changed:
            self._limit_bytes, self._lent_bytes = limit_bytes, lent_bytes
            self._changed.notify_all()

    @contextmanager
    def room(self, count: int) -> Iterator[None]:
        """Wait until a decode of `count` bytes fits, and hold them during the block."""
        place = object()
        with self._changed:
            self._waiting.append(place)
            try:
                self._changed.wait_for(lambda: self._waiting[0] is place and self._fits(count))
                self._held_bytes += count
            finally:
                self._waiting.remove(place)
                self._changed.notify_all()  # the next in the queue may fit, too
        try:
            yield
        finally:
            with self._changed:
                self._held_bytes -= count
                self._changed.notify_all()

    def _fits(self, count: int) -> bool:
        return not self._held_bytes or self._held_bytes + count <= self._limit_bytes
