"""Division of long lists of inputs into batches, one a request. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from staged_pool.client.contents import Form, Given, characters, form
from staged_pool.runtime.input_ranges import InputRange

BATCH_CHARACTERS: Final = 2**20
"""Maximum characters of the inputs of one request; a token id counts as seven.

This is far below the server's limit on a body, and small enough that the server works on the first batch while the
client still sends the last one.
"""


def split(
    inputs: Sequence[Given],
    *,
    max_items: int,
    max_characters: int = BATCH_CHARACTERS,
    form_of: Callable[[Given], Form] = form,
) -> Iterator[InputRange]:
    """Divide inputs into batches, in their order; all inputs of a batch have the same form.

    An empty list gives one empty batch, which the server rejects.

    Args:
        inputs: Inputs of a call.
        max_items: Maximum inputs of a batch.
        max_characters: Maximum characters of a batch; a longer input is a batch of its own.
        form_of: Returns the form of an input.
    """
    first, total, common = 0, 0, form_of(inputs[0]) if inputs else None
    for place, given in enumerate(inputs):
        more, its_form = characters(given), form_of(given)
        too_many = place - first == max_items or total + more > max_characters or its_form != common
        if too_many and place > first:
            yield InputRange(first, place - first)
            first, total = place, 0
        total += more
        common = its_form
    yield InputRange(first, len(inputs) - first)
