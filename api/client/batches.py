"""Large lists in requests of a size that a server takes: pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from staged_pool.client.contents import Form, Given, characters, form

BATCH_CHARACTERS: Final = 2**20
"""Of the texts of one request; a token id counts as seven. Far below what a server takes of a body, and little enough
that the first batch is at work while the last one is being sent."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some inputs of a call, one after the other."""

    first: int
    count: int

    @property
    def last(self) -> int:
        """The first one behind it."""
        return self.first + self.count


def cut(
    inputs: Sequence[Given],
    *,
    max_items: int,
    max_characters: int = BATCH_CHARACTERS,
    form_of: Callable[[Given], Form] = form,
) -> Iterator[Stretch]:
    """Which inputs go together, in their order: all of one form, as many as may be.

    No inputs at all are one stretch of none: what is wrong with that is for the server to say.

    Args:
        inputs: Of a call.
        max_items: In a stretch.
        max_characters: In a stretch; one input that is longer goes alone.
        form_of: What the inputs of a stretch have in common.
    """
    first, total, common = 0, 0, form_of(inputs[0]) if inputs else None
    for place, given in enumerate(inputs):
        more, its_form = characters(given), form_of(given)
        too_many = place - first == max_items or total + more > max_characters or its_form != common
        if too_many and place > first:
            yield Stretch(first, place - first)
            first, total = place, 0
        total += more
        common = its_form
    yield Stretch(first, len(inputs) - first)
