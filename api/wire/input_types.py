"""The `input_type` of a request, mapped to one of the model's prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from staged_pool.runtime.card import ModelCard
from staged_pool.stages.errors import InvalidInput, shortened

INPUT_TYPES: Final[Mapping[str, str | None]] = {
    "query": "query",
    "document": "document",
    "passage": "document",
    "search_query": "query",
    "search_document": "document",
    "classification": None,
    "clustering": None,
    "image": None,
}
"""Values sent by clients of Voyage, NIM and Cohere, and the prompt that each selects; None: the default prompt."""


def prompt_for(input_type: str | None, card: ModelCard, *, strict: bool = False) -> str | None:
    """Return the name of the prompt for an `input_type`; None: the default prompt.

    A model without prompts reads all texts in the same way, so the value is ignored there.

    Args:
        input_type: One of the model's own prompts, or a key of `INPUT_TYPES`.
        card: The model's description.
        strict: Reject unknown values even if the model has no prompts, as Cohere does.

    Raises:
        InvalidInput: The value is unknown; the message lists the known ones.
    """
    if input_type is None or input_type in card.prompts:
        return input_type
    if not card.prompts and not strict:
        return None
    if input_type not in INPUT_TYPES:
        known = ", ".join(dict.fromkeys((*card.prompts, *INPUT_TYPES)))
        message = f"Unsupported input_type '{shortened(input_type)}'. Supported values: {known}"
        raise InvalidInput(message, param="input_type")
    return INPUT_TYPES[input_type] if card.prompts else None
