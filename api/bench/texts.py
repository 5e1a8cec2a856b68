"""Texts of a wanted number of tokens, made of common words, and no two equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np

from staged_pool.stages import foreign_text
from staged_pool.stages.errors import ConfigError

_COMMON: Final = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face level office door health person art war history party result change morning reason research girl "
    "guy moment air teacher force education foot boy age policy music market sense nation plan college interest death "
    "experience effect use class control field development role effort rate heart drug show leader light voice wife "
    "police mind price report decision son view town road arm difference value building action season society tax "
    "director position player record paper space ground form event official matter center couple site project activity "
    "star table court oil situation cost industry figure street image phone data cover quality practice piece land "
    "product doctor wall patient worker news test movie north love support technology step baby computer type attention"
)
WORDS: Final = _COMMON.split()
"""Common words, which most tokenizers read as one token each."""


@dataclass(frozen=True, slots=True)
class TokenRate:
    """Tokens of a text by its words, as a server counts them."""

    per_word: float = 1.0
    per_text: float = 0.0
    """Tokens that each text has beside its words, such as [CLS] and [SEP]."""
    source: str = "assumed"
    """Source of the numbers: the usage of answers, /tokenize, or an assumption."""

    def words(self, tokens: int) -> int:
        """Return the number of words that make a text of these tokens; at least one."""
        return max(1, round((tokens - self.per_text) / self.per_word))


class TextMaker:
    """Makes texts of random words.

    Equal texts would be answered once by a server that keeps results or joins equal inputs. Long texts differ by
    chance. Texts of few words differ in their first two, which count up.

    Args:
        rng: Source of randomness.
        rate: Tokens of a word.
    """

    def __init__(self, rng: np.random.Generator, rate: TokenRate) -> None:
        self._rng = rng
        self._rate = rate
        self._numbers = count(int(rng.integers(len(WORDS) ** 2)))

    def __call__(self, tokens: int) -> str:
        """Make a text of about this length."""
        words = self._rate.words(tokens)
        number = next(self._numbers)
        chosen = [WORDS[number % len(WORDS)], WORDS[number // len(WORDS) % len(WORDS)]][:words]
        if words > 2:
            chosen += [WORDS[place] for place in self._rng.integers(len(WORDS), size=words - 2).tolist()]
        return " ".join(chosen)


def lines_of(path: Path) -> Sequence[str]:
    """Read the texts of a file, one a line; empty lines are left out.

    Raises:
        ConfigError: It cannot be read, or has no text.
    """
    try:
        lines = [line for line in foreign_text.lines_of(path.read_bytes()) if line.strip()]
    except (OSError, foreign_text.BadText) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"file={str(path)!r}: cannot be read ({reason})") from None
    if not lines:
        raise ConfigError(f"file={str(path)!r}: has no text; write one a line")
    return lines


def in_turn(lines: Sequence[str]) -> Callable[[int], str]:
    """Return a function that gives the lines in turn, whatever number of tokens is wanted."""
    places = count()
    return lambda tokens: lines[next(places) % len(lines)]
