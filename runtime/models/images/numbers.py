"""Numbers of an image processor, with their bounds: each sizes the memory of every image."""

from __future__ import annotations

from typing import Any, Final

from staged_pool.runtime.models.specs.json_file import MOST_PIXELS
from staged_pool.stages.errors import ConfigError

MOST_MERGED: Final = 64
"""Most patches along one edge, or frames, that are taken together."""

MOST_MADE: Final = 2**26
"""Most pixels that every image may be enlarged to."""

MOST_TILES: Final = 32
"""Most tiles along one edge of an image."""


def three(value: Any, field: str, name: str) -> tuple[float, ...]:
    values = tuple(value) if isinstance(value, list | tuple) else (value,) * 3
    if len(values) != 3 or not all(isinstance(number, int | float) for number in values):
        raise ConfigError(f"{name}: {field} must be three numbers")
    return tuple(map(float, values))


def positive(value: object, field: str, name: str, most: int = MOST_PIXELS) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{name}: {field} must be a whole number from 1 to {most}")
    return value
