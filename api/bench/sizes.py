"""Sizes of made-up inputs, as flags give them: tokens, texts, images, and shares of kinds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

import numpy as np

from staged_pool.stages.errors import ConfigError

Kind: TypeAlias = Literal["texts", "images", "rerank"]
"""Kind of a request, by its inputs."""

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
MOST_TOKENS: Final = 1_000_000
MOST_PIXELS: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class Range:
    """A number, or all numbers between two with equal chances."""

    low: int
    high: int

    @classmethod
    def of(cls, field: str, text: str, most: int = MOST_TOKENS) -> Range:
        """Read `64` or `8-256`.

        Raises:
            ConfigError: It is neither, or out of range.
        """
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
        low, high = (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))
        if not 1 <= low <= high <= most:
            raise ConfigError(
                f"{field}={text!r}: must be a number such as 64, or a range such as 8-256, up to {most:,}"
            )
        return cls(low, high)

    def draw(self, rng: np.random.Generator) -> int:
        """Draw one number."""
        return self.low if self.low == self.high else int(rng.integers(self.low, self.high + 1))

    @property
    def mean(self) -> float:
        """Mean of the numbers."""
        return (self.low + self.high) / 2

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Width and height in pixels."""

    width: int
    height: int

    @classmethod
    def of(cls, text: str) -> ImageSize:
        """Read `640x480`.

        Raises:
            ConfigError: It is no such size, or too large.
        """
        found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
        size = cls(0, 0) if found is None else cls(int(found[1]), int(found[2]))
        if not 1 <= size.width * size.height <= MOST_PIXELS or max(size.width, size.height) > 65_500:
            raise ConfigError(f"images={text!r}: must be width x height in pixels, such as 640x480")
        return size

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


def read_mix(text: str) -> Mapping[Kind, float]:
    """Read the shares of kinds, such as `texts=0.9,images=0.1`; they add up to 1.

    Raises:
        ConfigError: A kind is unknown or there twice, or the shares do not add up to 1.
    """
    example = "such as texts=0.9,images=0.1"
    shares: dict[Kind, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        kind = next((each for each in KINDS if each == name.strip()), None)
        if kind is None or kind in shares:
            raise ConfigError(f"mix={text!r}: must be shares of {', '.join(KINDS)}, each once, {example}")
        try:
            share = float(number)
        except ValueError:
            share = -1.0
        if not 0 < share <= 1:
            raise ConfigError(f"mix={text!r}: each share must be above 0 and at most 1, {example}")
        shares[kind] = share
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise ConfigError(f"mix={text!r}: the shares add up to {sum(shares.values()):g}; they must add up to 1")
    return shares
