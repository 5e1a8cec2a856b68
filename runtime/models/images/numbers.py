"""Numbers of an image processor, with their bounds: each sizes the memory of every image."""

from __future__ import annotations

from sys import float_info
from typing import Any, Final

from staged_pool.runtime.models.specs.json_file import MOST_PIXELS, shown
from staged_pool.stages.errors import ConfigError

MOST_MERGED: Final = 64
"""Most patches along one edge, or frames, that are taken together."""

MOST_MADE: Final = 2**26
"""Most pixels that every image may be enlarged to."""

MOST_TILES: Final = 32
"""Most tiles along one edge of an image."""


def three(value: Any, field: str, name: str) -> tuple[float, ...]:
    """Return three finite numbers, one for each colour; a single one stands for all."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,) * 3
    if len(values) != 3:
        raise ConfigError(f"{name}: {field} must be three numbers")
    return tuple(finite(each, field, name) for each in values)


def finite(value: object, field: str, name: str) -> float:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -float_info.max <= value <= float_info.max:
        raise ConfigError(f"{name}: {field}={shown(value)} must be a finite number")
    return float(value)


def resampling(value: object, name: str, usual: int) -> int:
    """Return Pillow's number of a resampling filter; `usual` for None."""
    if value is None:
        return usual
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: resample={shown(value)} must be the number of a filter")
    return int(value)


def positive(value: object, field: str, name: str, most: int = MOST_PIXELS) -> int:
    """Return a whole number from 1 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{name}: {field} must be a whole number from 1 to {most}")
    return value
