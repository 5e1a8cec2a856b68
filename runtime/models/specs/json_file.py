"""JSON files of a model folder, read field by field with type checks."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from sys import float_info
from typing import Any, Final, TypeVar

from staged_pool.runtime.models.specs import lfs_pointer
from staged_pool.stages import foreign_json, foreign_text
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.foreign_file import read_file

T = TypeVar("T")
D = TypeVar("D")

MOST: Final = 2**31 - 1
"""Largest whole number of a setting: kernels and tokenizers count in 32 bits."""

MOST_LABELS: Final = 2**20
"""Most labels that a number may ask for; a name is made for each."""

MOST_PIXELS: Final = 2**13
"""Largest edge in a setting, in pixels, of the images that a model sees."""


_MOST_SHOWN: Final = 100
"""Most characters of a value in a message."""


@dataclass(frozen=True, slots=True)
class JsonFile:
    """A JSON file, or an object inside one."""

    name: str
    """Name in error messages: the path relative to the model folder, and the object inside the file."""
    content: Any

    @classmethod
    def read(cls, path: Path, *, root: Path, kind: type[dict[str, Any]] | type[list[Any]] = dict) -> JsonFile | None:
        """Read one file. None: the file does not exist.

        Raises:
            ConfigError: It is no regular file, too large or not JSON, or its outermost value is not of type `kind`.
        """
        name = str(path.relative_to(root))
        try:
            stored = bytes(read_file(path))
            lfs_pointer.check_content(stored, name)
            content = foreign_json.decode(foreign_text.decoded(_without_mark(stored)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{name}: cannot be read as JSON: {error}") from error
        if not isinstance(content, kind):
            raise ConfigError(f"{name}: must hold {'a list' if kind is list else 'an object'}")
        return cls(name, content)

    @classmethod
    def empty(cls) -> JsonFile:
        """Return the stand-in for a missing optional file: every field has its default."""
        return cls("", {})

    def get(self, field: str, kind: type[T], default: D) -> T | D:
        """Return the field's value, or `default` if the field is absent or null.

        Raises:
            ConfigError: The value is not of type `kind`.
        """
        value = self.content.get(field)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.name}: {field}={shown(value)} must be of type {kind.__name__}")
        if isinstance(value, float) and not isfinite(value):
            raise ConfigError(f"{self.name}: {field}={value} must be a finite number")
        if isinstance(value, int) and abs(value) > MOST:
            raise ConfigError(f"{self.name}: {field}={shown(value)} must be between {-MOST} and {MOST}")
        return value

    def positive(self, field: str, most: int = MOST) -> int | None:
        """Return an integer from 1 to `most`; None if the field is missing.

        Raises:
            ConfigError: The value is something else.
        """
        value = self.get(field, int, None)
        if value is not None and not 1 <= value <= most:
            raise ConfigError(f"{self.name}: {field}={value} must be {_range(most)}")
        return value

    def number(self, field: str, default: D) -> float | D:
        """Return a finite number above 0, or `default` if the field is absent or null.

        Raises:
            ConfigError: The value is something else.
        """
        value = self.content.get(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= float_info.max:
            raise ConfigError(f"{self.name}: {field}={shown(value)} must be a number above 0")
        return float(value)

    def size(self, field: str, most: int = MOST) -> int:
        """Return an integer from 1 to `most` from a required field.

        Raises:
            ConfigError: The field is missing, or its value is something else.
        """
        if (value := self.positive(field, most)) is None:
            raise ConfigError(f"{self.name}: {field} is missing")
        return value


def _without_mark(content: bytes) -> bytes:
    """Return the content of a file of UTF-8 without a byte order mark.

    Raises:
        BadText: It has another encoding, or a mark, which transformers does not read.
    """
    if foreign_text.unmarked(content) != content:
        raise foreign_text.BadText("it begins with a byte order mark; save it as UTF-8 without one")
    return content


def shown(value: object) -> str:
    """Return a value of a file for a message, shortened: Python does not print a number of thousands of digits."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _range(most: int) -> str:
    return "at least 1" if most == MOST else f"from 1 to {most}"
