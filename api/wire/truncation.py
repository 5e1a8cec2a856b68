"""Values of truncation fields, which clients spell in upper or lower case."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, Self

from staged_pool.runtime.requests import Side


class AnyCase(StrEnum):
    """Enum values that are read in any case.

    msgspec looks a member up by its value, and calls `_missing_` if there is none.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        lowered = value.lower()
        return next((word for word in cls if word.lower() == lowered), None)


class TruncationSide(AnyCase):
    """vLLM's names of the end that is cut."""

    LEFT = "left"
    RIGHT = "right"


class Direction(AnyCase):
    """Text-embeddings-inference's names of the end that is cut."""

    LEFT = "Left"
    RIGHT = "Right"


class Truncate(AnyCase):
    """Cohere's and NIM's names of the end that is cut; `NONE` rejects a text that is too long."""

    NONE = "NONE"
    START = "START"
    END = "END"


class TruncatePassages(AnyCase):
    """Values of `truncate` in NIM's rankings, which cut only at the end."""

    NONE = "NONE"
    END = "END"


SIDES: Final[Mapping[TruncationSide | Direction, Side]] = {
    TruncationSide.LEFT: "left",
    TruncationSide.RIGHT: "right",
    Direction.LEFT: "left",
    Direction.RIGHT: "right",
}
"""Each dialect's name of an end, and the engine's."""


def side_of(word: TruncationSide | Direction | None) -> Side | None:
    """Return the engine's name of the end that is cut; None if the request names none."""
    return None if word is None else SIDES[word]
