"""Large lists in requests of a size that a server takes: pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

BATCH_CHARACTERS: Final = 2**20
"""Of the texts of one request; a token id counts as seven. Far below what a server takes of a body, and little enough
that the first batch is at work while the last one is being sent."""

_CHARACTERS_OF_AN_ID: Final = 7

Input: TypeAlias = str | Sequence[int] | tuple[str, str]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some inputs of a call, one after the other."""

    first: int
    count: int

    @property
    def last(self) -> int:
        """The first one behind it."""
        return self.first + self.count


def cut(inputs: Sequence[Input], *, max_items: int, max_characters: int = BATCH_CHARACTERS) -> Iterator[Stretch]:
    """Which inputs go together, in their order: all of one form, as many as may be.

    No inputs at all are one stretch of none: what is wrong with that is for the server to say.

    Args:
        inputs: Texts, token ids, pairs of texts.
        max_items: In a stretch.
        max_characters: In a stretch; one input that is longer goes alone.
    """
    first, characters, form = 0, 0, _form(inputs[0]) if inputs else ""
    for place, given in enumerate(inputs):
        more, its_form = _characters(given), _form(given)
        too_many = place - first == max_items or characters + more > max_characters or its_form != form
        if too_many and place > first:
            yield Stretch(first, place - first)
            first, characters = place, 0
        characters += more
        form = its_form
    yield Stretch(first, len(inputs) - first)


def _form(given: Input) -> str:
    if isinstance(given, str):
        return "text"
    return "pair" if given and isinstance(given[0], str) else "ids"


def _characters(given: Input) -> int:
    if isinstance(given, str):
        return len(given)
    if given and isinstance(given[0], str):
        return sum(len(text) for text in given if isinstance(text, str))
    return _CHARACTERS_OF_AN_ID * len(given)
