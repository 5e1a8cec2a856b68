"""Special tokens that a tokenizer adds to one text or to a pair.

They are found by comparison of the ids with and without them. A tokenizer that does not add the same tokens at the same
places to every text is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from tokenizers import Tokenizer

from staged_pool.runtime.tokens import TokenIds
from staged_pool.stages.errors import ConfigError

_PROBES: Final = ("x", "a b c", "Two sentences. Of words?")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Token ids before and after one text."""

    prefix: TokenIds
    suffix: TokenIds

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)


@dataclass(frozen=True, slots=True)
class PairSpecialTokens:
    """Token ids around and between two texts."""

    prefix: TokenIds
    middle: TokenIds
    suffix: TokenIds
    typed_middle: int | None
    """Number of middle tokens that belong to the first segment. None: all token types are 0."""

    def __len__(self) -> int:
        return len(self.prefix) + len(self.middle) + len(self.suffix)

    def join(self, first: Sequence[int], second: Sequence[int]) -> TokenIds:
        return [*self.prefix, *first, *self.middle, *second, *self.suffix]

    def first_tokens(self, first: Sequence[int]) -> int | None:
        """Count the tokens of the first segment for this first text. None: there is only one segment."""
        return None if self.typed_middle is None else len(self.prefix) + len(first) + self.typed_middle


def find_special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Find the ids that the tokenizer adds before and after every text.

    Raises:
        ConfigError: It adds them at other places, or not the same ones to every text.
    """
    bare = [e.ids for e in tokenizer.encode_batch_fast(list(_PROBES), add_special_tokens=False)]
    full = [e.ids for e in tokenizer.encode_batch_fast(list(_PROBES), add_special_tokens=True)]
    added = len(full[0]) - len(bare[0])
    for before in range(added + 1):
        found = SpecialTokens(full[0][:before], full[0][before + len(bare[0]) :])
        if all(f == [*found.prefix, *b, *found.suffix] for f, b in zip(full, bare, strict=True)):
            return found
    raise ConfigError("the tokenizer does not add the same special tokens before and after every text")


def read_frame(frame: tuple[str, str], tokenizer: Tokenizer) -> SpecialTokens:
    """Tokenize the texts written before and after an input.

    Raises:
        ConfigError: The tokenizer merges them with the input, so they have no ids of their own.
    """
    before, after = (e.ids for e in tokenizer.encode_batch_fast(list(frame), add_special_tokens=False))
    inside = tokenizer.encode_batch_fast(list(_PROBES), add_special_tokens=False)
    framed = [f"{frame[0]}{probe}{frame[1]}" for probe in _PROBES]
    whole = tokenizer.encode_batch_fast(framed, add_special_tokens=False)
    if any(full.ids != [*before, *bare.ids, *after] for full, bare in zip(whole, inside, strict=True)):
        raise ConfigError(f"the tokenizer merges inputs with the text around them: {frame[0]!r} and {frame[1]!r}")
    return SpecialTokens(before, after)


def find_pair_special_tokens(tokenizer: Tokenizer, *, gives_types: bool) -> PairSpecialTokens:
    """Find the ids that the tokenizer adds to every pair, and the second segment's start.

    Args:
        tokenizer: A tokenizer without truncation and padding.
        gives_types: True if the model takes token types.

    Raises:
        ConfigError: It does not add the same ids to every pair, or its types are not 0 for the first segment and 1
            for the second.
    """
    pairs = list(product(_PROBES, repeat=2))
    alone = tokenizer.encode_batch_fast(list(_PROBES), add_special_tokens=False)
    bare = {text: encoding.ids for text, encoding in zip(_PROBES, alone, strict=True)}
    full = tokenizer.encode_batch_fast(pairs, add_special_tokens=True)
    known = [(bare[first], bare[second], e.ids, e.type_ids) for (first, second), e in zip(pairs, full, strict=True)]
    places = [way for way in _ways(*known[0][:3]) if all(way.join(a, b) == ids for a, b, ids, _ in known)]
    if not places:
        raise ConfigError(
            "the tokenizer does not add the same special tokens around and between the texts of every pair"
        )
    if not gives_types:
        return places[0]
    for typed_middle in (None, *range(len(places[0].middle) + 1)):
        way = replace(places[0], typed_middle=typed_middle)
        if all(_types(way, a, len(ids)) == types for a, _, ids, types in known):
            return way
    raise ConfigError("the tokenizer's token types are not 0 for the first text of a pair and 1 for the second")


def _ways(first: TokenIds, second: TokenIds, full: TokenIds) -> Iterator[PairSpecialTokens]:
    """Yield every split of a sequence into prefix, first text, middle, second text and suffix."""
    added = len(full) - len(first) - len(second)
    for before in range(added + 1):
        for between in range(added - before + 1):
            middle = before + len(first)
            after = middle + between + len(second)
            yield PairSpecialTokens(full[:before], full[middle : middle + between], full[after:], None)


def _types(way: PairSpecialTokens, first: TokenIds, tokens: int) -> list[int]:
    zeros = way.first_tokens(first)
    return [0] * tokens if zeros is None else [0] * zeros + [1] * (tokens - zeros)
