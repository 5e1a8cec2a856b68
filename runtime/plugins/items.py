"""Model inputs of plugins, as the stages see them: with numbers and keys that hold no code of a user.

Stages compare keys and add up tokens outside of the boundary to user code. So both are turned into values of this
package while the hooks still run.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final

ARRAY_BYTES_PER_TOKEN: Final = 4096
"""Bytes of an array that cost as much as a token: a patch of 16 x 16 pixels with four channels of float32."""

NUMBER_BYTES: Final = 4

MOST_ARRAY_BYTES: Final = 2**62
"""No array has more bytes. A value that says so is none."""

MOST_TOKENS: Final = 2**31 - 1
"""Largest cost of a model input in tokens."""

_MOST_KEYS: Final = 65_536
"""Keys that are remembered, such as shapes of arrays. Beyond them all are forgotten."""


@dataclass(frozen=True, slots=True)
class PluginItem:
    """A model input of a plugin with a forward of its own. As a row, its value is the result."""

    value: Any
    numbers: int
    """Count of numbers of 4 bytes in an array; 0 for other values."""


def plugin_item(value: object) -> PluginItem:
    """Make an item of a value of a user, inside the boundary to user code."""
    return PluginItem(value, array_bytes(value) // NUMBER_BYTES)


def array_bytes(value: object) -> int:
    """Return the bytes of an array; 0 for other values. Inside the boundary to user code."""
    size = getattr(value, "nbytes", 0)
    return int(size) if isinstance(size, int) and 0 <= size <= MOST_ARRAY_BYTES else 0


def tokens_of(item: object, given: object) -> int:
    """Return the cost of a model input in tokens. Inside the boundary to user code.

    Args:
        item: The model input.
        given: Result of the plugin's `tokens`. None: one for each 4 KiB of an array.

    Raises:
        ValueError: It is no number, or above `MOST_TOKENS`.
    """
    if given is None:
        return min(max(1, array_bytes(item) // ARRAY_BYTES_PER_TOKEN), MOST_TOKENS)
    tokens = max(1, int(given))  # type: ignore[call-overload]  # an error is the plugin's
    if tokens > MOST_TOKENS:
        raise ValueError(f"`tokens` returned a number above {MOST_TOKENS}")
    return int(tokens)


class BatchKeys:
    """Turns the batch keys of a plugin into numbers: equal keys into equal ones. Thread-safe.

    A key is hashed and compared here, inside the boundary to user code, and nowhere else.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[Hashable, int] = {}
        self._given = 0

    def number_of(self, key: Hashable) -> int | None:
        """Return the number of a key; None for None.

        Raises:
            TypeError: The key cannot be hashed.
        """
        if key is None:
            return None
        with self._lock:
            if len(self._numbers) >= _MOST_KEYS:
                self._numbers.clear()
            number = self._numbers.setdefault(key, self._given)
            self._given += number == self._given
            return number
