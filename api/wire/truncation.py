"""Words for how long texts are cut, which clients spell in any case."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, Self

from staged_pool.runtime.requests import Side


class AnyCase(StrEnum):
    """Words that are read in any case; msgspec finds a member by its value, and asks `_missing_` otherwise."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        lowered = value.lower()
        return next((word for word in cls if word.lower() == lowered), None)


class TruncationSide(AnyCase):
    """vLLM's names of the end that is cut off."""

    LEFT = "left"
    RIGHT = "right"


class Direction(AnyCase):
    """The same in text-embeddings-inference."""

    LEFT = "Left"
    RIGHT = "Right"


class Truncate(AnyCase):
    """The same in Cohere and NIM; `NONE` rejects what is too long."""

    NONE = "NONE"
    START = "START"
    END = "END"


class TruncatePassages(AnyCase):
    """The same in NIM's rankings, which cut only the end."""

    NONE = "NONE"
    END = "END"


SIDES: Final[Mapping[TruncationSide | Direction, Side]] = {
    TruncationSide.LEFT: "left",
    TruncationSide.RIGHT: "right",
    Direction.LEFT: "left",
    Direction.RIGHT: "right",
}
"""The engine's name of each end."""


def side_of(word: TruncationSide | Direction | None) -> Side | None:
    """The end that is cut off; None where a request does not say it."""
    return None if word is None else SIDES[word]
